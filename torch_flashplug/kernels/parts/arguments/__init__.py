"""The ABI, kernels' side of it: `operands` has what all kinds share, a kind's own file what only it is called with, so
that a change of one kind's arguments makes no other's kernels again.
"""
