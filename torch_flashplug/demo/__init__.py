"""`python -m torch_flashplug demo`: a byte-level GPT on real text, ours beside stock. Knows F.sdpa and the public
face, nothing below.
"""
