"""Addresses of elements in swizzled shared-memory tiles of sm_80. No GPU.

Each unit has a separate address, and rows that are read or written together are in different banks. The shortcuts of
kernels (an exclusive or, constant offsets) give equal addresses.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the DSL is needed to import kernels")

from torch_flashplug.kernels.primitives import sm80  # noqa: E402

START = 1024
BANK_BYTES = 128  # bytes of shared memory per cycle
TILES = [sm80.SmemTile(START, rows, columns) for rows in (16, 48, 64, 128) for columns in (32, 64, 96, 128, 192, 256)]


def tile_id(tile) -> str:
    return f"{tile.rows}x{tile.columns}"


def address(tile, row: int, column: int) -> int:
    """Return the address of an element's unit."""
    unit = column % tile.panel // sm80.VECTOR
    return tile.unit(row, unit) + column // tile.panel * tile.panel_bytes


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_units_fill_the_tile_without_gaps(tile):
    places = {address(tile, row, column) for row in range(tile.rows) for column in range(0, tile.columns, sm80.VECTOR)}
    assert places == set(range(START, START + tile.bytes, sm80.VECTOR_BYTES))
    assert tile.bytes == 2 * tile.rows * tile.columns


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_eight_rows_are_in_different_banks(tile):
    """A phase of ldmatrix reads the same unit of eight rows."""
    for row in range(0, tile.rows, 8):
        for column in range(0, tile.columns, sm80.VECTOR):
            banks = {address(tile, row + r, column) % BANK_BYTES for r in range(8)}
            assert len(banks) == 8


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_row_is_written_without_bank_conflict(tile):
    """Eight threads of cp.async write 128 bytes: the units of one row, or of two rows."""
    units = tile.panel // sm80.VECTOR
    for row in range(0, tile.rows, 8 // units):
        banks = {tile.unit(row + t // units, t % units) % BANK_BYTES for t in range(8)}
        assert len(banks) == 8


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_unit_pairs_differ_by_an_exclusive_or(tile):
    """A lane keeps the address of one pair of units in the row; all further offsets do not depend on the row."""
    for row in range(tile.rows):
        for unit in (0, 1):
            for pair in range(tile.panel // sm80.PAIR):
                assert tile.unit(row, unit) ^ 32 * pair == tile.unit(row, unit + 2 * pair)


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
def test_row_and_panel_offsets_are_constants(tile):
    for row in range(tile.rows - 8):
        for column in range(0, tile.columns, sm80.PAIR):
            address_in_panel = address(tile, row, column % tile.panel)
            assert address(tile, row + 8, column) == address_in_panel + tile.offset(8, column)


@pytest.mark.parametrize("tile", TILES, ids=tile_id)
@pytest.mark.parametrize("threads", [32, 128, 256])
def test_mover_threads_reach_every_unit_once(tile, threads):
    """`SmemCopier.load` steps from row to row, and applies the swizzle if the step is no multiple of eight."""
    mover = sm80.SmemCopier(threads, None, elementwise=False)
    reached = []
    for thread in range(threads):
        row, unit, step = mover.partition(tile, thread)
        for r in range(0, tile.rows, step):
            if row + r < tile.rows:
                unit_address = (tile.unit(row, unit) ^ (r % 8 * sm80.VECTOR_BYTES)) + r * tile.row_bytes
                assert unit_address == tile.unit(row + r, unit)
                reached.append(unit_address)
    assert len(set(reached)) == len(reached) == tile.rows * tile.panel // sm80.VECTOR
