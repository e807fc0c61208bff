"""`python -m torch_flashplug demo`: a byte-level GPT, trained and sampled with and without the plugin.

The model calls F.scaled_dot_product_attention only. Without a GPU, one kernel is interpreted and nothing is timed.

- `model`: The model.
- `llama`: A model in the style of Llama, for several GPUs.
- `input_text`: The text file.
- `train`: Training.
- `serve`: Sampling from a KV cache.
- `long_context`: Long contexts.
- `precision`: 8-bit attention.
- `multi_gpu`: Several GPUs.
- `call_recorder`: The record of all attention calls.
- `scopes`: Switches the plugin off and on.
- `inference`: The main demo: attention calls, errors and times of a prompt.
- `benchmark_table`: Numbers measured on an H100, read from tools/results.
- `without_gpu`: The demo on a machine without a GPU.
"""
