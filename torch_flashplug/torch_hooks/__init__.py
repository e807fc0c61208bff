"""Hooks into torch: everything that changes how torch treats attention.

- `hook_list`: The hooks, by when they are installed.
- `describe_call`: The facts of a call, read from Python tensors.
- `tracing`: What torch.compile and torch.export record of a call.
- `vmap`: The batching rules.
- `flop_counter`: The FLOP formulas.
- `sdpa_composite`: A Python implementation of F.scaled_dot_product_attention, used where the choice hook is missing.
- `stock_workarounds`: The switch of the workarounds for bugs of stock attention.
- `op_owners`: The libraries that registered kernels over those of torch.
- `varlen_attn`: The ops of torch.nn.attention.varlen.
- `flash_attention_op`: aten::_flash_attention_forward.
- `efficient_attention_op`: aten::_efficient_attention_forward.
- `flash_impl_registry`: The name FLASHPLUG in torch.nn.attention.
- `recomputation`: The backend of recomputed calls under torch.utils.checkpoint.
- `distributed/`: DTensor and torch's context_parallel.
"""
