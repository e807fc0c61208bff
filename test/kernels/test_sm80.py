"""Where elements of sm_80's swizzled tiles lie: every unit has a place of its own, rows that are read or written at
once lie in different banks, and the shortcuts that kernels take (an exclusive or, constant offsets) lead there. No GPU.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.primitives import sm80  # noqa: E402

START = 1024
BANK_BYTES = 128  # of shared memory in one cycle
TILES = [sm80.SmemTile(START, rows, columns) for rows in (16, 48, 64, 128) for columns in (32, 64, 96, 128, 192, 256)]


def tile_id(tile) -> str:
    return f"{tile.rows}x{tile.columns}"


def address(tile, row: int, column: int) -> int:
    """Of the unit that holds an element."""
    unit = column % tile.panel // sm80.VECTOR
    return tile.unit(row, unit) + column // tile.panel * tile.panel_bytes


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_units_fill_the_tile(tile):
    places = {address(tile, row, column) for row in range(tile.rows) for column in range(0, tile.columns, sm80.VECTOR)}
    assert places == set(range(START, START + tile.bytes, sm80.VECTOR_BYTES))
    assert tile.bytes == 2 * tile.rows * tile.columns


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_eight_rows_lie_in_different_banks(tile):
    """What one phase of ldmatrix reads: the same unit of eight rows."""
    for row in range(0, tile.rows, 8):
        for column in range(0, tile.columns, sm80.VECTOR):
            banks = {address(tile, row + r, column) % BANK_BYTES for r in range(8)}
            assert len(banks) == 8


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_a_row_is_written_without_conflict(tile):
    """What eight threads of cp.async write: as many units of one row, or of two, as are 128 bytes."""
    units = tile.panel // sm80.VECTOR
    for row in range(0, tile.rows, 8 // units):
        banks = {tile.unit(row + t // units, t % units) % BANK_BYTES for t in range(8)}
        assert len(banks) == 8


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_pairs_are_an_exclusive_or_away(tile):
    """A lane keeps the address of one pair of units of its row; the others follow without the row."""
    for row in range(tile.rows):
        for unit in (0, 1):
            for pair in range(tile.panel // sm80.PAIR):
                assert tile.unit(row, unit) ^ 32 * pair == tile.unit(row, unit + 2 * pair)


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_rows_eight_apart_and_panels_are_constants_away(tile):
    for row in range(tile.rows - 8):
        for column in range(0, tile.columns, sm80.PAIR):
            first = address(tile, row, column % tile.panel)
            assert address(tile, row + 8, column) == first + tile.offset(8, column)


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
@pytest.mark.parametrize("threads", [32, 128, 256])
def test_movers_reach_every_unit_once(tile, threads):
    """By the step from row to row that `Mover.load` takes, and its turn where that is no multiple of eight."""
    mover = sm80.SmemCopier(threads, None, elementwise=False)
    reached = []
    for thread in range(threads):
        row, unit, step = mover.place(tile, thread)
        for r in range(0, tile.rows, step):
            if row + r < tile.rows:
                place = (tile.unit(row, unit) ^ (r % 8 * sm80.VECTOR_BYTES)) + r * tile.row_bytes
                assert place == tile.unit(row + r, unit)
                reached.append(place)
    assert len(set(reached)) == len(reached) == tile.rows * tile.panel // sm80.VECTOR
