"""What users call. Arguments are checked here, and nothing else is decided here.

- `backend`: enable(), disable(), sdpa_backend() and explain().
- `startup`: The steps that switch the plugin on, once in a process.
- `attention`: attention().
- `direct_attention`: Plain calls of attention() in one C function.
- `attention_args`: The checks of the arguments of attention().
- `masked_attention`: attention() with a tree_mask, and with sinks beside a mask.
- `varlen`: attention() of packed sequences, KV caches and paged KV caches.
- `varlen_args`: The checks of cu_seqlens and seqused_k.
- `varlen_plan`: plan_varlen(): tile lists that several calls share.
- `kv_cache`: append_kv().
- `quantize_kv`: quantize_kv(), and attention() with the result.
- `block_sparse`: attention() with a block_mask.
- `explain_attention`: explain_attention().
- `explain_varlen`: explain_varlen().
- `causal_bias`: What explain() reports about the masks of torch.nn.attention.bias.
"""
