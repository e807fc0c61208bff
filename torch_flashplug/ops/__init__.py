"""Custom ops: schemas, fake implementations, gradients, and references in plain torch.

- `sdpa`: The ops behind F.scaled_dot_product_attention.
- `attention`: The ops behind attention(): windows, softcap, sinks, packed sequences, LSE.
- `paged`: Paged KV caches.
- `block_sparse`: Block-sparse attention.
- `block_mask`: The conversion of a FlexAttention BlockMask.
- `quantized_kv`: 8-bit keys and values.
- `quantize_ahead`: Key and value that are quantized once.
- `reference`: Attention in plain torch.
- `dropout_reference`: The dropout mask in plain torch.
- `mask_preprocess_reference`: Mask preprocessing in plain torch.
- `quantize_reference`: Quantization in plain torch.
- `bitmask`: Bitmasks in plain torch.
"""
