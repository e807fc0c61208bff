"""Parts of the forward mainloop and epilogue.

- `softmax`: The online softmax.
- `scaled_softmax`: The online softmax of 8-bit products.
- `output_accumulator`: The accumulation of the output.
"""
