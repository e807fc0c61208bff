"""KV cache in INT8 for Hugging Face transformers.

The cache takes a little more than half the memory, and decode reads half the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..ops.quantize_reference import in_int8, mean_of_finite, rotate, signs
from ..ops.quantized_kv import QuantizedTensor

LEAST, SHARE = 64, 8  # spare capacity after growth: the larger of LEAST tokens and 1 / SHARE of all tokens
CONSTANT = 16  # least tokens for a mean: a mean of fewer would follow single tokens


class _Rows:
    """Rows of keys or values (B, H, S, D) in INT8 with a scale for each row, in a growing buffer."""

    def __init__(self) -> None:
        self.data8: Tensor | None = None  # (B, H, capacity, D)
        self.scale: Tensor | None = None  # (B, H, capacity)

    @torch.no_grad()
    def put(self, x: Tensor, at: int) -> None:
        data8, scale = in_int8(x)
        end, full = at + x.shape[2], self.data8 is None or at + x.shape[2] > self.data8.shape[2]
        kept = self.data8 is not None and self.data8.is_inference() and not torch.is_inference_mode_enabled()
        if full or kept:  # an inference tensor is not writable outside inference mode
            room = end + max(LEAST, end // SHARE)
            self.data8, self.scale = (
                torch.cat([old[:, :, :at], new.new_zeros((*new.shape[:2], room - at, *new.shape[3:]))], 2)
                if old is not None
                else new.new_zeros((*new.shape[:2], room, *new.shape[3:]))
                for old, new in ((self.data8, data8), (self.scale, scale))
            )
        self.data8[:, :, at:end], self.scale[:, :, at:end] = data8, scale

    def map(self, change: object) -> None:
        self.data8, self.scale = change(self.data8), change(self.scale)


class Int8Layer(DynamicLayer):
    """Keys and values of a layer in INT8, with a scale for each token and head.

    Before quantization, a constant is subtracted from the keys: the mean of the first update, if the update is long
    enough. The keys are then rotated (quantize_reference.py), so no channel stands out. Apart from the constant, the
    stored form of a token does not depend on tokens of the same update or later updates.

    The first update returns the given tensors, so attention over the prompt is exact. No gradient flows through tensors
    read back from the cache.
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        self._rows, self._shift, self._tokens = (_Rows(), _Rows()), None, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self._rows = key_states.dtype, key_states.device, (_Rows(), _Rows())
        self._shift = mean_of_finite(key_states.detach().float())
        if key_states.shape[2] < CONSTANT:
            self._shift = torch.zeros_like(self._shift)
        self._signs = signs(key_states.shape[-1], key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Append keys and values, and return the keys and values for the attention.

        Args:
            key_states (Tensor): new keys (B, Hkv, S, D).
            value_states (Tensor): new values (B, Hkv, S, Dv).
            *args (object): unused, for the signature of transformers.
            **kwargs (object): unused, for the signature of transformers.

        Returns:
            tuple[Tensor, Tensor]: keys and values of all tokens. The first update returns `key_states` and
            `value_states`, and later updates return QuantizedTensors.
        """
        first = not self.is_initialized
        if first:
            self.lazy_initialization(key_states, value_states)
        self._rows[0].put(rotate(key_states.detach().float() - self._shift, self._signs), self._tokens)
        self._rows[1].put(value_states, self._tokens)
        self._tokens += key_states.shape[2]
        self._show()
        return (key_states, value_states) if first else (self.keys, self.values)

    def _show(self) -> None:
        keys, values = ([x[:, :, : self._tokens] for x in (rows.data8, rows.scale)] for rows in self._rows)
        self.keys = QuantizedTensor(*keys, self.dtype, self._shift, rotated=True)
        self.values = QuantizedTensor(*values, self.dtype)

    def _map(self, change: object) -> None:
        if self.is_initialized:
            for rows in self._rows:
                rows.map(change)
            self._shift = change(self._shift)
            self._show()

    def get_seq_length(self) -> int:
        return self._tokens

    def reset(self) -> None:
        self.__init__()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of the layer.

        Args:
            tokens_to_remove (int): the negated number of tokens to remove.

        Raises:
            ValueError: tokens_to_remove is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: tokens_to_remove must be the negated number of tokens to remove, but got {tokens_to_remove}."
            )
        if self.is_initialized:
            self._tokens = max(0, self._tokens + tokens_to_remove)
            self._show()
            self.is_initialized = self._tokens > 0  # an empty layer starts anew

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda x: x.to(self.device, non_blocking=True))


class Int8Cache(DynamicCache):
    """KV cache with layers in INT8 for model.generate(..., past_key_values=Int8Cache(model.config)).

    Layers with full attention keep keys and values in INT8 (`Int8Layer`). All further layers, such as layers with
    sliding windows, stay the layers of transformers.

    Args:
        config (object): configuration of the model, or None.
        **kwargs (object): further arguments of transformers' DynamicCache.
    """

    def __init__(self, config: object = None, **kwargs: object) -> None:
        super().__init__(config=config, **kwargs)
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = Int8Layer
        self.layers = [Int8Layer() if type(layer) is DynamicLayer else layer for layer in self.layers]
