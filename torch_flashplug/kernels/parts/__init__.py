"""What kernels share. A part imports only spec and geometry, never another part's kernel."""
