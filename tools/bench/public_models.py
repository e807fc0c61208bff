"""Attention calls of published models as data: heads of the models, and calls with everyday sizes.

The heads are those of the models' published configurations. Lengths are typical of the model (tokens of an image,
frames of a recording), or odd sequence lengths. Calls have no mask tensor. Windows of single layers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_flashplug.testing import Case


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, head dim and mask of a model; `value_dim` 0 means the head dim."""

    query: int
    kv: int
    dim: int
    causal: bool = True
    value_dim: int = 0


HEADS: dict[str, Heads] = {
    # Language models
    "Llama-3.1-8B": Heads(32, 8, 128),
    "Llama-3.1-70B": Heads(64, 8, 128),
    "Llama-3.2-1B": Heads(32, 8, 64),
    "Llama-3.2-3B": Heads(24, 8, 128),
    "Qwen2.5-0.5B": Heads(14, 2, 64),
    "Qwen2.5-1.5B": Heads(12, 2, 128),
    "Qwen2.5-7B": Heads(28, 4, 128),
    "Qwen2.5-14B": Heads(40, 8, 128),
    "SmolLM2-135M": Heads(9, 3, 64),
    "SmolLM2-360M": Heads(15, 5, 64),
    "Mixtral-8x22B": Heads(48, 8, 128),
    "Phi-2": Heads(32, 32, 80),
    "Phi-3-mini": Heads(32, 32, 96),
    "Gemma-3-4B": Heads(8, 4, 256),
    "Falcon3-7B": Heads(12, 4, 256),
    "Nemotron-4-340B": Heads(96, 8, 192),
    "DeepSeek-V2-Lite": Heads(16, 16, 192, value_dim=128),
    # Encoders, and models of images and speech
    "BERT-base": Heads(12, 12, 64, causal=False),
    "ViT-B/16": Heads(12, 12, 64, causal=False),
    "CLIP-ViT-L/14-336": Heads(16, 16, 64, causal=False),
    "InternViT-300M": Heads(16, 16, 64, causal=False),
    "ViT-H/14": Heads(16, 16, 80, causal=False),
    "SigLIP-so400m-384": Heads(16, 16, 72, causal=False),
    "EVA02-CLIP-E/14": Heads(16, 16, 112, causal=False),
    "Whisper-large-v3": Heads(20, 20, 64, causal=False),
    "DiT-XL/2": Heads(16, 16, 72, causal=False),
    "SDXL": Heads(10, 10, 64, causal=False),
    "Stable-Diffusion-3": Heads(24, 24, 64, causal=False),
    "FLUX.1": Heads(24, 24, 128, causal=False),
}

# Kind of call -> (model, batch, query rows[, keys]). Without a number of keys, there are as many keys as query rows.
SIZES: dict[str, tuple[tuple, ...]] = {
    "forward": (
        ("Llama-3.1-8B", 1, 3001),
        ("Llama-3.1-8B", 1, 6143),
        ("Llama-3.1-70B", 1, 3001),
        ("Llama-3.2-1B", 4, 1023),
        ("Llama-3.2-3B", 2, 1500),
        ("Qwen2.5-0.5B", 4, 777),
        ("Qwen2.5-1.5B", 2, 1500),
        ("Qwen2.5-7B", 1, 3001),
        ("Qwen2.5-14B", 1, 4250),
        ("SmolLM2-135M", 8, 577),
        ("SmolLM2-360M", 4, 1025),
        ("Mixtral-8x22B", 1, 3001),
        ("Phi-2", 1, 1500),
        ("Phi-3-mini", 1, 3001),
        ("Gemma-3-4B", 1, 3001),
        ("Falcon3-7B", 1, 1500),
        ("Nemotron-4-340B", 1, 2047),
        ("DeepSeek-V2-Lite", 1, 3001),
        ("BERT-base", 16, 384),
        ("ViT-B/16", 32, 197),
        ("CLIP-ViT-L/14-336", 8, 577),
        ("InternViT-300M", 8, 1025),
        ("ViT-H/14", 16, 257),
        ("SigLIP-so400m-384", 8, 729),
        ("EVA02-CLIP-E/14", 8, 257),
        ("Whisper-large-v3", 4, 1500),
        ("Whisper-large-v3", 4, 448, 1500),  # cross-attention of a text to a recording
        ("DiT-XL/2", 8, 1024),
        ("SDXL", 2, 4096, 77),  # cross-attention of an image to a prompt
        ("Stable-Diffusion-3", 2, 4250),
        ("FLUX.1", 1, 4608),
    ),
    "train": (
        ("Llama-3.1-8B", 2, 4096),
        ("Llama-3.1-70B", 1, 4096),
        ("Llama-3.2-3B", 2, 3001),
        ("Qwen2.5-0.5B", 8, 1025),
        ("Qwen2.5-1.5B", 4, 1500),
        ("Qwen2.5-7B", 2, 3001),
        ("Qwen2.5-14B", 1, 4250),
        ("SmolLM2-135M", 16, 1025),
        ("SmolLM2-360M", 8, 1500),
        ("Mixtral-8x22B", 1, 3001),
        ("Phi-2", 2, 1500),
        ("Phi-3-mini", 1, 3001),
        ("Gemma-3-4B", 1, 3001),
        ("Nemotron-4-340B", 1, 2047),
        ("DeepSeek-V2-Lite", 2, 3001),
        ("ViT-B/16", 64, 197),
        ("CLIP-ViT-L/14-336", 16, 577),
        ("SigLIP-so400m-384", 16, 729),
        ("EVA02-CLIP-E/14", 16, 257),
        ("Whisper-large-v3", 8, 1500),
        ("Stable-Diffusion-3", 2, 4250),
    ),
    "decode": (
        ("Llama-3.1-8B", 1, 1, 3001),
        ("Llama-3.1-8B", 16, 1, 1500),
        ("Llama-3.1-70B", 4, 1, 3001),
        ("Llama-3.2-3B", 4, 1, 4250),
        ("Qwen2.5-0.5B", 8, 1, 1025),
        ("Qwen2.5-7B", 1, 1, 3001),
        ("Qwen2.5-14B", 1, 1, 4250),
        ("SmolLM2-360M", 1, 1, 577),
        ("Mixtral-8x22B", 8, 1, 3001),
        ("Phi-2", 4, 1, 1500),
        ("Phi-3-mini", 1, 1, 3001),
        ("Gemma-3-4B", 1, 1, 3001),
        ("Falcon3-7B", 8, 1, 4250),
        ("Whisper-large-v3", 8, 1, 1500),
    ),
}


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Attention call of a model: "forward", "train" (forward and backward), or "decode" (one query row)."""

    model: str
    kind: str
    case: Case

    @property
    def direction(self) -> str:
        """Direction of the call in the words of `runner.call_of`."""
        return "train" if self.kind == "train" else "fwd"


def _call(kind: str, model: str, batch: int, rows: int, keys: int = 0) -> ModelCall:
    heads, keys = HEADS[model], keys or rows
    lengths = f"{rows}x{keys}" if rows != keys else rows
    case = Case(
        f"{model}_{kind}_b{batch}_{lengths}", batch, heads.query, heads.kv, rows, keys, heads.dim,
        heads.value_dim or heads.dim, causal=heads.causal and rows == keys,
        layout="bhsd" if kind == "decode" else "bshd",  # KV caches of models have the heads before the keys
    )  # fmt: skip
    return ModelCall(model, kind, case)


def model_calls() -> list[ModelCall]:
    """Return the calls of all models, as the suite `everyday` times them."""
    return [_call(kind, *size) for kind, sizes in SIZES.items() for size in sizes]
