"""What kernels share. A part imports the spec and those that others are made of, never a kernel."""
