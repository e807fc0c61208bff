"""A small Llama of Hugging Face, with random weights from a fixed seed."""

from __future__ import annotations

import pytest
import torch
from device_backend import DeviceBackend
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY = 256  # bytes


def new_llama(device_backend: DeviceBackend, *, layers: int, hidden_size: int, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        attn_implementation="sdpa",
        **settings,
    )
    return transformers.LlamaForCausalLM(config).to(device_backend.device, device_backend.dtype)
