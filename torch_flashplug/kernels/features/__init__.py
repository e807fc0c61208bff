"""One file for each feature. `base` has the interface; registry/features.py names the classes.

- `base`: The interface between a kernel and its features.
- `causal`: Causal masks.
- `mask`: Bool masks.
- `bias`: Float masks.
- `window`: Sliding windows.
- `softcap`: Soft capping.
- `varlen`: Packed sequences.
- `equal_lengths`: Packed sequences of equal lengths.
- `dropout`: Dropout.
- `quantized_qkv`: 8-bit products.
- `quantized_kv_cache`: 8-bit KV caches.
- `paged_kv`: Paged KV caches.
- `paged_prefill`: Packed queries over paged KV caches.
- `balanced_splits`: Balanced splits of paged KV caches in decode.
- `decode_mask`: Bool masks in decode.
- `decode_bias`: Float masks in decode.
- `decode_window`: Windows in decode.
- `shared_values`: Values that are the first columns of the keys, in decode.
"""
