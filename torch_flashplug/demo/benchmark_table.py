"""Table of measured speeds on an H100 for the demo, read from the results of tools/bench/bench.py in tools/results.

The ratios are those of docs/benchmarks.md: the time of a peer divided by the time of the torch_flashplug kernel. A
ratio above 1 means that the torch_flashplug kernel is faster. The files are part of a checkout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parents[2] / "tools" / "results"
SUITES = {
    "forward": "forward",
    "headdims": "forward, other head dims",
    "latency": "forward of short and small calls",
    "backward": "backward",
    "train": "forward and backward",
    "decode": "decode: few queries, many keys",
}


def _summary(ratios: Sequence[float]) -> tuple[str, str]:
    return f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}"


def show(console: Console) -> None:
    """Print the table of all suites, or where to find the table."""
    documents = {name: RESULTS / f"{name}-h100.json" for name in SUITES}
    documents = {name: json.loads(path.read_text()) for name, path in documents.items() if path.is_file()}
    if not documents:
        console.print(
            "The speeds measured on an H100 are in tools/results of a checkout; this installation is not a checkout."
        )
        return
    first = next(iter(documents.values()))
    title = f"Measured earlier on one {first['gpu']}, torch {first['torch']}, not on this machine: speed of our kernels"
    table = Table(title=title)
    for column in ("suite", "calls", "x stock's default", "lowest", "x best peer", "lowest", "measured", "file"):
        table.add_column(column, justify="left" if column in ("suite", "file") else "right", no_wrap=column == "file")
    for name, document in documents.items():
        rows = document["rows"]
        over_stock = [row["peers_ms"]["stock"] / row["ours_ms"] for row in rows if "stock" in row["peers_ms"]]
        over_best = [row["ratio"] for row in rows]
        cells = (*_summary(over_stock), *_summary(over_best))
        table.add_row(SUITES[name], str(len(rows)), *cells, document["date"], f"{name}-h100.json")
    console.print(table)
    console.print(
        "Geometric means of a peer's time over our time, and the lowest: above 1 ours is faster. Peers: cuDNN, torch's "
        "FlashAttention-2, the FA3 and FA4 wheels. Ours is forced here; in auto, classes of calls below 0.97 stay with "
        "stock torch. More: docs/benchmarks.md."
    )
