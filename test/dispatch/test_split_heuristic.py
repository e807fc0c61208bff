"""Plans of calls with few query rows: packing of rows, and the number of CTAs that share the keys. No GPU.

Numerics are tested in test_decode.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from forced_splits import CAUSAL_TEXT, MAX_SPLITS, plan_of_forced_call
from traced_graphs import AUTO, FA3

import torch_flashplug
from torch_flashplug import sdpa_backend
from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.testing import new_case


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the table afterwards."""
    yield
    startup.push_tables()


@pytest.fixture
def own_table(restored: None) -> None:
    """Push a table with round costs: 1 us for a block of keys, 1.2 us for a cluster, 1.5 us for a second kernel."""
    rows = [kernel_table.KernelRow("fwd", 90, 64, 64, kernel_table.BOTH, 64, 128, 2)]
    cost_model = dispatch_table.CostModel(
        max_decode_rows=64, max_packed_rows=64, packed_wave_ns=0, occupancy=0.8, cluster_ns=1200, cluster_rate=30,
        combine_ns=1500, combine_rate=1500, read_efficiency=1,
    )  # fmt: skip
    bindings.push_rows(
        (*rows, kernel_table.KernelRow("decode", 90, 64, 64, ("full",), 64, 64, 4, 1000)), (), cost_model
    )


@pytest.mark.usefixtures("own_table")
@pytest.mark.parametrize(
    "heads, rows, requested_splits, tiles, splits, cluster",
    [
        ((64, 32, 8), (1, 8192), 0, 512, 1, 1),  # more tiles than SMs
        ((67, 1, 1), (1, 8192), 0, 67, 1, 1),  # twice as many CTAs would exceed the SMs
        ((66, 1, 1), (1, 8192), 0, 66, 2, 2),
        ((1, 32, 8), (1, 8192), 0, 8, 16, 1),
        ((1, 1, 1), (1, 1 << 20), 0, 1, 132, 1),
        ((1, 32, 8), (16, 193), 0, 8, 4, 4),  # at most one split per block of keys
        ((1, 32, 8), (1, 128), 0, 8, 1, 1),  # the cluster would cost more than the saved block
        ((1, 32, 8), (1, 512), 0, 8, 8, 8),
        ((1, 32, 8), (1, 1024), 0, 8, 16, 1),  # eight blocks cost more than the second kernel
        # forced splits ignore the gate, and use clusters while clusters fit on the GPU
        ((1, 32, 32), (1, 1024), 3, 32, 3, 3),
        ((1, 32, 32), (1, 1024), 4, 32, 4, 1),
        ((67, 1, 1), (1, 1024), 2, 67, 2, 2),  # a forced pair always uses a cluster
        ((1, 32, 8), (1, 8192), 1, 8, 1, 1),
        ((1, 32, 8), (1, 129), MAX_SPLITS, 8, 3, 3),  # at most one split per block
        ((1, 32, 8), (1, 1 << 20), MAX_SPLITS, 8, MAX_SPLITS, 1),
        ((2, 8, 8), (1000, 1000), 4, 256, 4, 1),  # forced splits also apply to more rows than a tile has
        ((1, 32, 32), (100000, 1 << 20), MAX_SPLITS, 50016, 10, 1),  # partial results are counted in 32 bits
    ],
)
def test_number_of_splits_and_cluster_size(heads, rows, requested_splits, tiles, splits, cluster):
    plan = plan_of_forced_call(new_case("gate", heads, rows, (64, 64)), requested_splits)
    assert (plan["backend"], plan["kernel"]) == ("fa3", "decode_sm90_bf16_d64_full_m64n64s4")
    assert (plan["tiles"], plan["splits"], plan["cluster"]) == (tiles, splits, cluster)


@pytest.mark.usefixtures("own_table")
def test_causal_and_long_query_calls_are_not_split():
    for rows in ((1, 8192), (1000, 1000)):
        causal = new_case("causal", (1, 32, 8), rows, (64, 64), "causal")
        assert plan_of_forced_call(causal, 4)["reasons"]["fa3"] == CAUSAL_TEXT
        assert plan_of_forced_call(causal, 1)["kernel"] == "fwd_sm90_bf16_d64_causal_m64n128s2"
    more_rows = new_case("rows", (1, 32, 8), (17, 8192), (64, 64))
    assert {plan_of_forced_call(more_rows, requested_splits)["kernel"] for requested_splits in (0, 1)} == {
        "fwd_sm90_bf16_d64_full_m64n128s2"
    }


@pytest.mark.usefixtures("restored")
def test_more_than_64_rows_are_packed_if_faster():
    """A block of 64 rows costs 1 us, a block of 128 rows 1.5 us, packed or not; packing costs 3 us more."""
    fwd, narrow = (kernel_table.KernelRow(kind, 90, 64, 64, ("full",), 64, 64, 4, 1000) for kind in ("fwd", "decode"))
    more_rows = {"max_packed_rows": 256, "packed_wave_ns": 3000}
    cost_model = replace(dispatch_table.COST_MODEL, max_decode_rows=64, read_efficiency=1, **more_rows)
    bindings.push_rows((fwd, narrow, replace(narrow, tile_m=128, cost=1500)), (), cost_model)
    calls = {
        "decode, 64 rows": (((1, 32, 8), (16, 1024)), "decode_sm90_bf16_d64_full_m64n64s4"),
        "8 tiles of 128 rows, split": (((1, 32, 8), (17, 1024)), "decode_sm90_bf16_d64_full_m128n64s4"),
        "16 blocks unsplit, a wave of either": (((16, 32, 8), (32, 1024)), "decode_sm90_bf16_d64_full_m128n64s4"),
        "the same without packing": (((16, 8, 8), (65, 64)), "fwd_sm90_bf16_d64_full_m64n64s4"),
        "one block": (((1, 32, 8), (17, 64)), "fwd_sm90_bf16_d64_full_m64n64s4"),
        "too many rows": (((1, 32, 8), (65, 1024)), "fwd_sm90_bf16_d64_full_m64n64s4"),
    }
    for name, (shape, kernel) in calls.items():
        plan = plan_of_forced_call(new_case(name, *shape, (64, 64)))
        assert plan["kernel"] == kernel, (name, plan)
    packed = new_case("packed", (1, 32, 8), (17, 1024), (64, 64))
    assert "Sq*G = 17*4 = 68 > 64, <= 256: about " in plan_of_forced_call(packed)["gate"]
    assert plan_of_forced_call(packed, 1)["kernel"].startswith(
        "fwd"
    )  # unsplit tiles fill 8 SMs, unpacked tiles fill 32
    grad = bindings.plan(packed.sizes() | {"grad": 1}, DEVICES["h100"], FA3)
    assert grad["kernel"].startswith("fwd")  # rows of the dispatch table cover the gradients of the kernel


def test_exact_head_dim_has_priority_over_shorter_key_blocks():
    """No kernel of the current table for wider heads serves a call because of its shorter blocks of keys."""
    for D, rows, keys, B in itertools.product((64, 128, 256), (1, 16, 20, 64, 65, 128), (1, 100, 1000, 16384), (1, 64)):
        plan = plan_of_forced_call(new_case("own", (B, 2 * rows, 2), (1, keys), (D, D)), MAX_SPLITS)
        assert plan["kernel"].startswith(("decode", "fwd")) and f"_d{D}_" in plan["kernel"], plan


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("heads, rows", [((2, 2, 1), (1, 64)), ((1 << 20, 4096, 2048), (1, 64))], ids=["few", "many"])
def test_decode_kernel_with_the_longest_steps_runs_for_any_number_of_tiles(heads, rows):
    """Enough tiles for every SM: the decode kernel with the longest steps runs, wherever its row is in the table."""
    short = kernel_table.KernelRow("decode", 90, 64, 64, ("full",), 64, 64, 4, 1000)
    sizes = new_case("steps", heads, rows, (64, 64)).sizes()
    kernels = set()
    for table in itertools.permutations((short, replace(short, tile_n=128))):
        bindings.push_rows(table, (), dispatch_table.COST_MODEL)
        kernels.add(bindings.plan(sizes, DEVICES["h100"], FA3)["kernel"])
    assert kernels == {f"decode_sm90_bf16_d64_full_m64n{64 if heads[0] == 2 else 128}s4"}


def test_gate_counts_a_tile_for_each_kv_head() -> None:
    """All packed rows of a KV head fit into one tile."""
    sizes = new_case("gate", (2, 32, 8), (16, 640), (64, 64), "causal").sizes()
    gate = bindings.plan(sizes, DEVICES["h100"])["gate"]
    assert gate == "Sq*G = 16*4 = 64 <= 64: tiles = B*Hkv = 2*8 = 16 < 0.800*132 SMs -> stock"


@pytest.mark.parametrize(
    "backend, splits", [("fa3", 256), ("fa3", -1), ("math", 2), ("auto", 1), ("fa2", 256), ("fa3", "2"), ("fa3", True)]
)
def test_invalid_num_splits_raises(backend, splits):
    with pytest.raises(
        ValueError, match=rf"num_splits must be 0, or 1 to 255 with 'fa3' or 'fa2', but got {splits!r} with '{backend}'"
    ):
        sdpa_backend(backend, num_splits=splits)


def test_nested_backend_blocks_restore_num_splits():
    q, k = (torch.empty(1, heads, rows, 64, dtype=torch.bfloat16, device="meta") for heads, rows in ((8, 1), (2, 640)))
    with sdpa_backend("fa3", num_splits=3):
        for inner, splits in ((MAX_SPLITS, 10), (2, 2)):
            with sdpa_backend("fa3", num_splits=inner):
                assert torch_flashplug.explain(q, k, k, enable_gqa=True, device="h100").splits == splits
            assert bindings.mode() == FA3 | 3 << 8
    assert bindings.mode() == AUTO
