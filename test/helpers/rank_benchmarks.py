"""Small runs of the benchmark suite `multi` on several ranks (ranks.py): timed baselines and the content of rows.

On a CPU the baselines refuse, because DTensor has no rule for the stock op there.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from ranks import ROOT, Rank

sys.path.append(str(ROOT))

from rich.console import Console  # noqa: E402

from tools.bench import baselines, ranks, report, result_schema  # noqa: E402
from tools.bench.runner import Bench  # noqa: E402
from tools.bench.suites import multi_gpu  # noqa: E402

SMALL = {"HEADS": 4, "KV_HEADS": 2, "D": 64, "CHECKED_ROWS": 128}


def case_suite(rank: Rank) -> None:
    s = 64 * rank.world
    calls = [
        multi_gpu.Call("train_ring_allgather_small", s, "ring", margins=True),
        multi_gpu.Call("fwd_ring_alltoall_small", s, "ring", "alltoall", direction="fwd"),
        multi_gpu.Call("train_ulysses_small", s, "ulysses"),
        multi_gpu.Call("train_blocks_small", s, "blocks"),
    ]
    bench = Bench(rank.device, 2, time.monotonic() + 60, "", True, {}, {})
    quiet = {"restart_watchdog": lambda: None}  # test/helpers/ranks.py has a watchdog
    with mock.patch.multiple(multi_gpu, calls=lambda: calls, **quiet, **SMALL), mock.patch("builtins.print"):
        with mock.patch.multiple(ranks, ROUND_MS=1.0, **quiet):
            multi_gpu.suite_multi(bench)
    if rank.number > 0:
        assert not bench.rows
        return
    assert [row["case"] for row in bench.rows] == [call.name for call in calls], (bench.rows, bench.skipped)
    for row, call in zip(bench.rows, calls):
        assert row["ours_ms"] > 0 and row["ranks"] == rank.world and row["flop"] > 0
        peers = set(row["peers_ms"]) | set(row["refused"])
        assert {"stock"} <= peers and ("stock_flash" in peers) == (call.way != "blocks"), row
        assert (row.get("steps_ms", 0) > 0) == (call.way == "ring")
        variants = {"margin8", "margin16", "gather"} if call.margins else set()
        assert set(row["variants_ms"]) == variants, row
    _check_result_file(rank, bench)


def _check_result_file(rank: Rank, bench: Bench) -> None:
    """Check the GPU names in the name of the result file, and the rows in table and plot."""
    document = report.header("multi", {}, "") | {"rounds": 2, "absent": {}, "skipped": {}, "rows": bench.rows}
    document["gpu"] += f" x{rank.world}"
    report.print_table(document, Console(file=io.StringIO()))
    with tempfile.TemporaryDirectory() as folder, mock.patch("builtins.print"):
        path = report.write_json(document, Path(folder))
        assert path.name.endswith(f"x{rank.world}.json"), path
        stored_rows = result_schema.read(path)["rows"]
        assert [row["variants_ms"].keys() for row in stored_rows if "variants_ms" in row] == [
            bench.rows[0]["variants_ms"].keys()
        ]
        report.plot(result_schema.read(path), baselines.labels(), path.with_suffix(".png"))
