"""FlexAttention's BlockMask as kernels read it: lists of blocks and words (mask_preprocess_reference.py), made in plain
torch on the mask's device, once for each mask. Only its blocks that hide something are looked into: nothing of Sq * Sk
is made but a bit a score, two where gradients are wanted.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..registry.kernel_spec import LISTED, TALL
from ..registry.mask_layout import KIND, MASKED, NONE, THREADS, TILE, WHOLE
from . import mask_preprocess_reference
from .bitmask import words

_AT_ONCE = 2048  # tiles of scores whose bits are asked for at once: 8 M of them
_MOST_HELD = 1000  # things that a mask_mod holds: more take longer to look at than the mask
_NOTHING_INSIDE = (Tensor, int, float, str, types.NoneType, type, types.ModuleType, torch.dtype, torch.device)
_OF_OBJECTS = {"__dict__", "__weakref__"}
_WANTED = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "BLOCK_SIZE", "seq_lengths")


class BlockLists(NamedTuple):
    """What attention(block_mask=) takes in the place of a BlockMask that it has looked at before; inside of
    torch.compile it takes nothing else.
    """

    digest: Tensor  # (B or 1, Hq or 1, n) int32
    Sq: int
    Sk: int
    gradients: bool  # whether backwards can read it, too
    tall: float = 1.0  # work of tiles of TALL queries over that of others: what is seen of both lines they have to see


class _Lists(NamedTuple):
    """Of (P, rows of blocks): how many blocks are listed, and (P, rows of blocks, room) which."""

    count: Tensor
    index: Tensor

    def on_grid(self, columns: int, state: int) -> Tensor:
        """(P, rows, columns): that state where a block is listed, else NONE. Numbers of none are left out."""
        listed = torch.arange(self.index.shape[-1], device=self.index.device) < self.count.unsqueeze(-1)
        listed = listed & (self.index >= 0) & (self.index < columns)
        found = torch.zeros(*self.index.shape[:2], columns + 1, dtype=torch.int8, device=self.index.device)
        return found.scatter_(2, torch.where(listed, self.index, columns).long(), state)[..., :columns]


class _Looked(NamedTuple):
    """At what lists were made of; kept, so that nothing else can be found at its address."""

    parts: tuple[object, ...]
    written: tuple[int | object, ...]  # how often each was; of what does not tell, like nothing else

    @classmethod
    def at(cls, block_mask: object) -> _Looked:
        parts = [getattr(block_mask, name) for name in _WANTED]
        parts += _held(getattr(block_mask, "mask_mod", None))
        return cls(tuple(parts), tuple(_version(x) for x in parts))

    def is_as(self, other: _Looked) -> bool:
        same = len(self.parts) == len(other.parts) <= _MOST_HELD and self.written == other.written
        return same and all(
            a is b or (isinstance(a, tuple) and a == b) for a, b in zip(self.parts, other.parts, strict=True)
        )


def _version(x: object) -> int | object:
    if not isinstance(x, Tensor):
        return 0
    return object() if x.is_inference() else x._version


def _held(mask_mod: object) -> list[object]:
    """What a function may read of its surroundings but globals, each thing once: closures, arguments of partials,
    defaults, what lies in tuples, lists and dicts, and attributes of objects. Up to one more than _MOST_HELD.
    """
    found, waiting, known = [], [mask_mod], set()
    while waiting and len(found) <= _MOST_HELD:
        x = waiting.pop()
        if id(x) not in known:
            known.add(id(x))
            found.append(x)
            waiting += _inside(x)
    return found


def _inside(x: object) -> list[object]:
    if isinstance(x, _NOTHING_INSIDE):
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


_known: weakref.WeakKeyDictionary[object, tuple[_Looked, BlockLists]] = weakref.WeakKeyDictionary()


def block_lists(block_mask: object, *, gradients: bool = True) -> BlockLists:
    """Of a torch.nn.attention.flex_attention.BlockMask, (B or 1, Hq or 1, Sq, Sk), with blocks of multiples of 64
    queries and keys: its lists, and what its mask_mod says of blocks that are listed as partial. It takes
    Sq * Sk / 8 bytes for each of its planes, with gradients twice as many. Waits for the device; a mask that was looked
    at is known again as long as its tensors, and what its mask_mod holds, are not written to: closures, defaults, what
    lies in tuples, lists, dicts and objects there, up to 1000 things. A mask that holds more is looked at every time,
    one with tensors of inference mode too; globals that a mask_mod reads are never. Raises TypeError, ValueError.
    """
    missing = [name for name in _WANTED if not hasattr(block_mask, name)]
    if missing:
        raise TypeError(
            f"attention: block_mask is {type(block_mask).__name__} and has no {', '.join(missing)}; "
            "give a BlockMask of torch.nn.attention.flex_attention"
        )
    looked = _Looked.at(block_mask)
    before, found = _known.get(block_mask, (None, None))
    if before is not None and looked.is_as(before) and (found.gradients or not gradients):
        return found
    with torch.inference_mode(False), torch.no_grad():  # what is kept may meet gradients later
        made = _made(block_mask, gradients)
    _known[block_mask] = (looked, made)
    return made


def _made(block_mask: object, gradients: bool) -> BlockLists:
    (Sq, Sk), (of_q, of_k) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    if of_q % TILE or of_k % TILE:
        raise ValueError(f"attention: blocks of block_mask are {of_q} x {of_k}; give multiples of {TILE}")
    *planes, rows = block_mask.kv_num_blocks.shape
    planes = [*(1,) * (2 - len(planes)), *planes]
    if len(planes) != 2 or min(Sq, Sk) < 1:
        raise ValueError(f"attention: block_mask is {(*planes, Sq, Sk)}; give (B or 1, Hq or 1, Sq, Sk), none of it 0")
    P, numbers = planes[0] * planes[1], mask_preprocess_reference.numbers_of(Sq, Sq, Sk, gradients=gradients)
    if any(
        found > most for found, most in zip((numbers, P * numbers), mask_preprocess_reference.MOST_NUMBERS, strict=True)
    ):
        raise ValueError(f"attention: block_mask {(*planes, Sq, Sk)} has more scores than kernels count; give one head")
    pairs = ((block_mask.kv_num_blocks, block_mask.kv_indices, MASKED),
             (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, WHOLE))  # fmt: skip
    grid = torch.zeros(P, rows, -(-Sk // of_k), dtype=torch.int8, device=block_mask.kv_indices.device)
    for count, index, state in pairs:
        if count is not None:
            lists = _Lists(count.reshape(P, rows), index.reshape(P, rows, -1))
            grid = torch.maximum(grid, lists.on_grid(grid.shape[2], state))
    M, N = -(-Sq // TILE), -(-Sk // TILE)
    tiles = grid.repeat_interleave(of_q // TILE, 1).repeat_interleave(of_k // TILE, 2)[:, :M, :N]
    if tiles.shape[1:] != (M, N):
        raise ValueError(f"attention: block_mask lists {rows} rows of {of_q} queries, and has {Sq} queries")
    seen = _Seen(getattr(block_mask, "mask_mod", None), planes[1], Sq, Sk)
    digest, tall = _digest(tiles, seen, gradients)
    return BlockLists(digest.view(*planes, numbers), Sq, Sk, gradients, tall)


class _Seen(NamedTuple):
    """Which scores of tiles are seen."""

    mask_mod: Callable | None
    heads: int
    Sq: int
    Sk: int

    def of(self, at: Tensor, whole: Tensor) -> Tensor:
        """(n, TILE, TILE) bool. at: (n, 3), plane and tile; whole: (n,), whether all that exists is seen."""
        plane, m, n = at.unbind(1)
        places = torch.arange(TILE, device=at.device)
        row, column = (x.unsqueeze(1) * TILE + places for x in (m, n))
        there = (row < self.Sq).unsqueeze(2) & (column < self.Sk).unsqueeze(1)
        if self.mask_mod is None:
            return there
        asked = self.mask_mod
        for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
            asked = torch.vmap(asked, in_dims=dims)
        within = row.clamp(max=self.Sq - 1), column.clamp(max=self.Sk - 1)
        return there & (asked(plane // self.heads, plane % self.heads, *within) | whole.view(-1, 1, 1))


def _digest(tiles: Tensor, seen: _Seen, gradients: bool) -> tuple[Tensor, float]:
    """Of (P, M, N) states of tiles of TILE x TILE scores; and the work of tall tiles over that of others."""
    P, M, N = tiles.shape
    some, every = tiles != NONE, tiles == WHOLE
    uncertain = (tiles == MASKED) | (every & _crosses(tiles, seen))
    rows = torch.zeros(P, M, N + 1, THREADS, dtype=torch.int32, device=tiles.device)
    rows[:, :, :N][every] = -1
    columns = rows.new_zeros(P, N, M + 1, THREADS) if gradients else rows
    if gradients:
        columns[:, :, :M][every.mT] = -1
    for at in uncertain.nonzero().split(_AT_ONCE):
        if not len(at):
            break  # of none there is one part, and vmap has no batch of 0
        plane, m, n = at.unbind(1)
        bits = seen.of(at, every[plane, m, n])
        rows[plane, m, n] = words(bits)[:, 0, 0]
        if gradients:
            columns[plane, n, m] = words(bits.mT)[:, 0, 0]
        some[plane, m, n] = bits.flatten(1).any(1)
        asked = m.unsqueeze(1) * TILE + torch.arange(TILE, device=at.device) >= seen.Sq  # rows that do not exist: not
        every[plane, m, n] = (bits.all(2) | asked).all(1)
    states = _states(some, every)
    made = mask_preprocess_reference.of_forwards(states, states, seen.Sq, rows)
    made += mask_preprocess_reference.of_gradients(states, columns) if gradients else []
    work = (int((x & KIND != NONE).sum()) * rows for x, rows in
            ((mask_preprocess_reference.tall(states, seen.Sq), TALL), (states, LISTED)))  # fmt: skip
    of_tall, of_others = work
    return torch.cat([part.flatten() for part in made]), of_tall / max(of_others, 1)


def _crosses(tiles: Tensor, seen: _Seen) -> Tensor:
    """Whether a tile goes beyond the last query or key, (M, N)."""
    M, N = tiles.shape[1:]
    end = [(torch.arange(1, count + 1, device=tiles.device) * TILE) for count in (M, N)]
    return (end[0] > seen.Sq).unsqueeze(1) | (end[1] > seen.Sk)


def _states(some: Tensor, every: Tensor) -> Tensor:
    """Of listed blocks, int32, of those of tiles (P, M, N): as digested.states() finds them."""
    parts = LISTED // TILE
    M, N = (-(-size // parts) * parts for size in some.shape[1:])
    blocks = []
    for x, rows_beyond in ((some, False), (every, True)):
        padded = x.new_full((len(x), M, N), rows_beyond)
        padded[:, :, some.shape[2] :] = False  # keys that do not exist are hidden, rows that do not are not asked
        padded[:, some.shape[1] :] = rows_beyond
        padded[:, : some.shape[1], : some.shape[2]] = x
        blocks.append(padded.view(len(x), M // parts, parts, N // parts, parts).permute(0, 1, 3, 2, 4))
    upper, lower = blocks[0].any(4).unbind(3)
    return mask_preprocess_reference.state_of(upper, lower, ~blocks[1].flatten(3).all(3))
