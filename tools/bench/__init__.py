"""Benchmark of this project's kernels against every importable peer.

- `bench`: Program that runs a suite.
- `baselines`: The plugin's backends and all importable peers.
- `cudnn_fp8`: cuDNN's FP8 kernel, a peer of the 8-bit suites.
- `decoder_stack`: Decoder layers in plain torch modules.
- `energy`: Energy of calls, from NVML.
- `memory_bandwidth`: Kernel that only reads K and V, for the bound of decode.
- `public_models`: Attention calls of published models.
- `ranks`: Synchronized processes, one for each GPU.
- `report`: Machine facts, tables and pictures; also a program that draws stored results.
- `result_schema`: File formats of results.
- `runner`: Checks, timing and rows, which all suites share.
- `suites`: One file for each family of suites.
- `workloads`: Lists of cases.
"""
