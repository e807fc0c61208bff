"""How keys and values reach the other ranks under torch's context_parallel."""

from __future__ import annotations

from ..torch_hooks.distributed.context_parallel import use

__all__ = ["use"]
