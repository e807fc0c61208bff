"""Tuning of the kernel table and of the decode gate.

- `tune`: Program that compiles and times candidates of the kernel table.
- `split_heuristic`: Fit of the constants of the decode gate.
"""
