"""Suites of the benchmark, one file for each family.

- `decode`: Few query rows against many keys, without and with a mask.
- `dense`: Head dim by causal mask by length, grouped heads, host time, and the classes of the dispatch table.
- `dropout`: Dropout of 0.1.
- `everyday`: Calls of published models, in auto mode.
- `large_head_dims`: Head dims above 256: forward, training and decode.
- `masks`: Bool masks, float masks, and FlexAttention's block masks.
- `model_stack`: A stack of decoder layers, with the plugin off and on.
- `multi_gpu`: All GPUs of a host.
- `paged`: Decode from paged KV caches.
- `paged_prefill`: Packed queries over paged KV caches.
- `quantized`: 8-bit attention, its errors, and 8-bit KV caches.
- `varlen_window`: Packed sequences, sliding windows, capped scores and sinks.
"""
