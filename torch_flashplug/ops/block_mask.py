"""Preprocessing of FlexAttention's BlockMask: block-sparse lists and a bitmask.

Kernels read both in the format of mask_preprocess_reference.py.
The work is done once for each mask, in plain torch on the device of the mask. Only blocks with
masked scores are evaluated: partial blocks, and full blocks beyond the last query or key. No tensor of Sq * Sk elements
is created except the bitmask: 1 bit for each score, or 2 bits if gradients are needed.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..deprecation import renamed_attribute
from ..registry.kernel_spec import SPARSE_BLOCK, SPARSE_BLOCK_M_192
from ..registry.mask_layout import EMPTY, FULL, PARTIAL, STATE_MASK, TILE, TILE_WORDS
from . import mask_preprocess_reference
from .bitmask import words

_TILES_PER_CALL = 2048  # tiles of scores evaluated in one call of mask_mod: 8 M scores
_MOST_HELD = 1000  # objects held by a mask_mod; comparing more objects would take longer than reading the mask
_LEAF_TYPES = (Tensor, int, float, str, types.NoneType, type, types.ModuleType, torch.dtype, torch.device)
_OF_OBJECTS = {"__dict__", "__weakref__"}
_MASK_ATTRIBUTES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "BLOCK_SIZE", "seq_lengths")


class PreparedBlockMask(NamedTuple):
    """Preprocessed BlockMask: the result of `prepare_block_mask()`, for the argument `block_mask` of `attention()`.

    Inside of torch.compile, `attention()` takes a PreparedBlockMask only, no BlockMask.
    """

    metadata: Tensor  # (B or 1, Hq or 1, n) int32: the mask metadata (block states, lists and the bitmask)
    Sq: int
    Sk: int
    gradients: bool  # True if `metadata` has the parts read by backward kernels
    # Work of tiles of `SPARSE_BLOCK_M_192` query rows over the work of the usual tiles. A block of so many query rows
    # lies in two rows of usual blocks, and must visit each block visible in either row.
    cost_ratio_192: float = 1.0

    digest = renamed_attribute("PreparedBlockMask", "digest", "metadata")
    tall = renamed_attribute("PreparedBlockMask", "tall", "cost_ratio_192")


class _BlockLists(NamedTuple):
    """Lists of blocks for each row of blocks: `count` (P, rows) and `index` (P, rows, capacity).

    P is the number of planes, where a plane is one (batch, head) pair of the mask.
    """

    count: Tensor
    index: Tensor

    def on_grid(self, columns: int, state: int) -> Tensor:
        """Return (P, rows, columns): `state` for listed blocks, else `EMPTY`. Indices out of range are skipped."""
        listed = torch.arange(self.index.shape[-1], device=self.index.device) < self.count.unsqueeze(-1)
        listed = listed & (self.index >= 0) & (self.index < columns)
        grid = torch.zeros(*self.index.shape[:2], columns + 1, dtype=torch.int8, device=self.index.device)
        return grid.scatter_(2, torch.where(listed, self.index, columns).long(), state)[..., :columns]


class MaskFingerprint(NamedTuple):
    """Fingerprint of a mask. The parts are kept alive, so that no later object can have the address of a part."""

    parts: tuple[object, ...]
    written: tuple[
        int | object, ...
    ]  # number of writes to each part; a unique object for a tensor without a version counter

    @classmethod
    def of(cls, block_mask: object) -> MaskFingerprint:
        parts = [getattr(block_mask, name) for name in _MASK_ATTRIBUTES]
        parts += _reachable_objects(getattr(block_mask, "mask_mod", None))
        return cls(tuple(parts), tuple(_version(x) for x in parts))

    def equals(self, fingerprint: MaskFingerprint) -> bool:
        same = len(self.parts) == len(fingerprint.parts) <= _MOST_HELD and self.written == fingerprint.written
        return same and all(
            a is b or (isinstance(a, tuple) and a == b) for a, b in zip(self.parts, fingerprint.parts, strict=True)
        )


def _version(x: object) -> int | object:
    if not isinstance(x, Tensor):
        return 0
    return object() if x.is_inference() else x._version


def _reachable_objects(mask_mod: object) -> list[object]:
    """Return all objects reachable from a function, except globals, each object once.

    Reachable are closures, arguments of partials, defaults, items of tuples, lists and dicts, and attributes of
    objects. The search ends after `_MOST_HELD` + 1 objects.
    """
    objects, pending, known_ids = [], [mask_mod], set()
    while pending and len(objects) <= _MOST_HELD:
        x = pending.pop()
        if id(x) not in known_ids:
            known_ids.add(id(x))
            objects.append(x)
            pending += _referenced_objects(x)
    return objects


def _referenced_objects(x: object) -> list[object]:
    if isinstance(x, _LEAF_TYPES):
        return []
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, (tuple, list, set, frozenset)):
        return list(x)
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if not _is_empty(cell)]
        return [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values()]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values(), *vars(x).values()]
    slots = (name for kind in type(x).__mro__ for name in kind.__dict__.get("__slots__", ()))
    inside = [getattr(x, name) for name in slots if name not in _OF_OBJECTS and hasattr(x, name)]
    return [*inside, *getattr(x, "__dict__", {}).values()]


def _is_empty(cell: object) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


_preprocessed: weakref.WeakKeyDictionary[object, tuple[MaskFingerprint, PreparedBlockMask]] = (
    weakref.WeakKeyDictionary()
)


def prepare_block_mask(block_mask: object, *, gradients: bool = True) -> PreparedBlockMask:
    """Preprocess a BlockMask for `attention()`: read the lists of blocks and evaluate `mask_mod` in partial blocks.

    The result takes Sq * Sk / 8 bytes for each batch and head of the mask, and twice as much with gradients. The call
    waits for the device. A preprocessed mask is recognized again, without work, as long as nobody writes to the tensors
    of the mask or to objects held by `mask_mod`: closures, defaults, and items of tuples, lists, dicts and objects
    inside, up to 1000 objects. A mask with more objects, or with tensors of inference mode, is preprocessed in every
    call. Changes of globals read by `mask_mod` are never noticed.

    Args:
        block_mask (BlockMask): A mask of torch.nn.attention.flex_attention, (B or 1, Hq or 1, Sq, Sk), with blocks of
            multiples of 64 queries and 64 keys.
        gradients (bool): Also make the parts read by backward kernels.

    Returns:
        The preprocessed mask, for the argument `block_mask` of `attention()`.

    Raises:
        TypeError: `block_mask` is no BlockMask.
        ValueError: The sizes of the mask or of the blocks are unsupported.
    """
    missing = [name for name in _MASK_ATTRIBUTES if not hasattr(block_mask, name)]
    if missing:
        raise TypeError(
            "attention: block_mask must be a BlockMask of torch.nn.attention.flex_attention, "
            f"but got {type(block_mask).__name__} without {', '.join(missing)}."
        )
    fingerprint = MaskFingerprint.of(block_mask)
    cached_fingerprint, cached = _preprocessed.get(block_mask, (None, None))
    if (
        cached_fingerprint is not None
        and fingerprint.equals(cached_fingerprint)
        and (cached.gradients or not gradients)
    ):
        return cached
    with torch.inference_mode(False), torch.no_grad():  # later calls with gradients may use the kept tensors
        lists = _prepare(block_mask, gradients)
    _preprocessed[block_mask] = (fingerprint, lists)
    return lists


def _prepare(block_mask: object, gradients: bool) -> PreparedBlockMask:
    (Sq, Sk), (of_q, of_k) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    if of_q % TILE or of_k % TILE:
        raise ValueError(f"attention: block_mask must have blocks of multiples of {TILE}, but got {of_q} x {of_k}.")
    *planes, rows = block_mask.kv_num_blocks.shape
    planes = [*(1,) * (2 - len(planes)), *planes]
    if len(planes) != 2 or min(Sq, Sk) < 1:
        raise ValueError(
            f"attention: block_mask must have shape (B or 1, Hq or 1, Sq, Sk) without a 0, but got {(*planes, Sq, Sk)}."
        )
    P, numbers = planes[0] * planes[1], mask_preprocess_reference.numbers_of(Sq, Sq, Sk, gradients=gradients)
    if any(
        size > limit for size, limit in zip((numbers, P * numbers), mask_preprocess_reference.MOST_NUMBERS, strict=True)
    ):
        raise ValueError(
            "attention: block_mask must have no more scores than kernels can count (2^31 - 1 numbers of metadata for "
            f"each head, 2^32 - 1 in total), but got {(*planes, Sq, Sk)}. Pass a mask with one head."
        )
    pairs = ((block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL),
             (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL))  # fmt: skip
    grid = torch.zeros(P, rows, -(-Sk // of_k), dtype=torch.int8, device=block_mask.kv_indices.device)
    for count, index, state in pairs:
        if count is not None:
            lists = _BlockLists(count.reshape(P, rows), index.reshape(P, rows, -1))
            grid = torch.maximum(grid, lists.on_grid(grid.shape[2], state))
    M, N = -(-Sq // TILE), -(-Sk // TILE)
    tiles = grid.repeat_interleave(of_q // TILE, 1).repeat_interleave(of_k // TILE, 2)[:, :M, :N]
    if tiles.shape[1:] != (M, N):
        raise ValueError(
            f"attention: block_mask must list blocks for all {Sq} queries, but got {rows} rows of {of_q} queries."
        )
    mask_scores = _MaskScores(getattr(block_mask, "mask_mod", None), planes[1], Sq, Sk)
    metadata, cost_ratio_192 = _metadata_of(tiles, mask_scores, gradients)
    return PreparedBlockMask(metadata.view(*planes, numbers), Sq, Sk, gradients, cost_ratio_192)


class _MaskScores(NamedTuple):
    """Evaluation of a mask_mod: visible scores of single tiles."""

    mask_mod: Callable | None
    heads: int
    Sq: int
    Sk: int

    def visible(self, tile_idx: Tensor, is_full: Tensor) -> Tensor:
        """Return the visible scores of n tiles as (n, TILE, TILE) bool.

        Args:
            tile_idx: (n, 3), plane, tile row and tile column.
            is_full: (n,) bool, True for a tile of a full block: all existing scores are visible.
        """
        plane, m, n = tile_idx.unbind(1)
        offsets = torch.arange(TILE, device=tile_idx.device)
        row, column = (x.unsqueeze(1) * TILE + offsets for x in (m, n))
        exists = (row < self.Sq).unsqueeze(2) & (column < self.Sk).unsqueeze(1)
        if self.mask_mod is None:
            return exists
        batched_mask_mod = self.mask_mod
        for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
            batched_mask_mod = torch.vmap(batched_mask_mod, in_dims=dims)
        clamped = row.clamp(max=self.Sq - 1), column.clamp(max=self.Sk - 1)
        return exists & (batched_mask_mod(plane // self.heads, plane % self.heads, *clamped) | is_full.view(-1, 1, 1))


def _metadata_of(tiles: Tensor, mask_scores: _MaskScores, gradients: bool) -> tuple[Tensor, float]:
    """Return the metadata for states (P, M, N) of TILE x TILE tiles, and the relative work of tiles of 192 rows."""
    P, M, N = tiles.shape
    has_visible, all_visible = tiles != EMPTY, tiles == FULL
    uncertain = (tiles == PARTIAL) | (all_visible & _crosses(tiles, mask_scores))
    rows = torch.zeros(P, M, N + 1, TILE_WORDS, dtype=torch.int32, device=tiles.device)
    rows[:, :, :N][all_visible] = -1
    columns = rows.new_zeros(P, N, M + 1, TILE_WORDS) if gradients else rows
    if gradients:
        columns[:, :, :M][all_visible.mT] = -1
    for tile_idx in uncertain.nonzero().split(_TILES_PER_CALL):
        if not len(tile_idx):
            break  # split() of an empty tensor yields one empty part, and vmap takes no batch of 0
        plane, m, n = tile_idx.unbind(1)
        bits = mask_scores.visible(tile_idx, all_visible[plane, m, n])
        rows[plane, m, n] = words(bits)[:, 0, 0]
        if gradients:
            columns[plane, n, m] = words(bits.mT)[:, 0, 0]
        has_visible[plane, m, n] = bits.flatten(1).any(1)
        row = m.unsqueeze(1) * TILE + torch.arange(TILE, device=tile_idx.device)
        beyond_rows = row >= mask_scores.Sq
        all_visible[plane, m, n] = (bits.all(2) | beyond_rows).all(1)
    states = _states(has_visible, all_visible)
    parts = mask_preprocess_reference.of_forwards(states, states, mask_scores.Sq, rows)
    parts += mask_preprocess_reference.of_gradients(states, columns) if gradients else []
    states_192 = mask_preprocess_reference.tall(states, mask_scores.Sq)
    work = (int((x & STATE_MASK != EMPTY).sum()) * rows for x, rows in
            ((states_192, SPARSE_BLOCK_M_192), (states, SPARSE_BLOCK)))  # fmt: skip
    of_tall, of_others = work
    return torch.cat([part.flatten() for part in parts]), of_tall / max(of_others, 1)


def _crosses(tiles: Tensor, mask_scores: _MaskScores) -> Tensor:
    """Return (M, N) bool: True for a tile beyond the last query or key."""
    M, N = tiles.shape[1:]
    end = [(torch.arange(1, count + 1, device=tiles.device) * TILE) for count in (M, N)]
    return (end[0] > mask_scores.Sq).unsqueeze(1) | (end[1] > mask_scores.Sk)


def _states(has_visible: Tensor, all_visible: Tensor) -> Tensor:
    """Return the int32 states of SPARSE_BLOCK x SPARSE_BLOCK blocks from flags of tiles (P, M, N).

    The format is that of `mask_preprocess_reference.states()`."""
    parts = SPARSE_BLOCK // TILE
    M, N = (-(-size // parts) * parts for size in has_visible.shape[1:])
    blocks = []
    for x, rows_beyond in ((has_visible, False), (all_visible, True)):
        padded = x.new_full((len(x), M, N), rows_beyond)
        padded[:, :, has_visible.shape[2] :] = False  # keys beyond Sk are masked out, rows beyond Sq do not count
        padded[:, has_visible.shape[1] :] = rows_beyond
        padded[:, : has_visible.shape[1], : has_visible.shape[2]] = x
        blocks.append(padded.view(len(x), M // parts, parts, N // parts, parts).permute(0, 1, 3, 2, 4))
    upper, lower = blocks[0].any(4).unbind(3)
    return mask_preprocess_reference.state_of(upper, lower, ~blocks[1].flatten(3).all(3))
