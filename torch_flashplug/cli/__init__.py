"""The verbs of `python -m torch_flashplug`.

- `explain`: `explain`: the plan of a call described by shapes.
- `env_info`: `info`: versions, devices, packs and flags.
- `check`: `check`: the self-test of an installation.
- `warmup`: `warmup`: compiles the kernels of a model ahead of time.
- `model_config`: The attention layers of a model, read from its configuration.
- `config_classes`: The default values of configurations, taken from transformers.
"""
