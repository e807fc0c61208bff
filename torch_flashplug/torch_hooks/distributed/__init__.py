"""Attention on several GPUs: DTensor and torch's context_parallel.

- `dtensor`: The sharding rules of the ops.
- `context_parallel`: The handlers of torch's context_parallel.
- `ring_attention`: The loop of ring attention.
- `ring_merge`: The merge of partial results of ring attention.
- `ring_merge_triton`: The merge as a Triton kernel.
- `allgather_kv`: Attention over all-gathered keys and values.
"""
