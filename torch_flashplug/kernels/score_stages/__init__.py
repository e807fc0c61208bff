"""Score modification: the stages between Q K^T and the softmax.

- `pipeline`: The sequence of stages, and the interface of a stage.
- `kv_bounds`: Causal masks, and the ends of sequences.
- `bitmask`: A bool mask.
- `bias`: A float mask.
- `bias_load`: The TMA loads of a float mask.
- `bias_read`: The direct loads of a float mask.
- `dropout`: DropoutStage.
- `softcap`: SoftcapStage.
- `sliding_window`: A sliding window.
- `natural_units`: Conversion between natural and base-2 logarithms.
"""
