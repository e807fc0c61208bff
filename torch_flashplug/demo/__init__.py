"""`python -m torch_flashplug demo`: a byte-level GPT on real text, whose attention runs on our kernels beside stock
torch's. The model knows F.scaled_dot_product_attention alone. Without a GPU one kernel is interpreted, and nothing is
timed.
"""
