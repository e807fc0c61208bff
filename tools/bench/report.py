"""Output of a benchmark: the facts of the machine, a JSON file, a table and a picture.

    python tools/bench/report.py tools/results/choice-h100.json --out DIR      draws pictures of existing JSON files

result_schema.py defines the file formats.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch_flashplug
from tools.bench import result_schema

ROOT = Path(__file__).resolve().parents[2]
CLOCK_FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "driver_version",
)
MASKED_ROWS, MASKED_DIMS = 4096, (128, 64)  # calls in the picture of masks
MASKED_BARS = {"flex": "tab:gray", "flex_flash": "tab:olive", "ours_fa3": "tab:blue"}  # colors in the picture of masks
SHOWN = "fa3"  # inputs in the picture of errors: N(0, 1) and outliers
DERIVED = {  # columns that result_schema.py derives, in the order of the table
    "device_ratio": "ratio on device",
    "energy_ratio": "ratio of energy",
    "grouped_over_ungrouped": "ungrouped/ours",
}
UNGROUPED_LIMIT = 0.95  # grouped heads must have this fraction of the speed of ungrouped heads
LIMIT = 1.03  # the project promises that auto mode takes at most 1.03 times the time of stock


def read_clocks() -> dict[str, str]:
    """Return the current clocks from nvidia-smi, or an empty dict if nvidia-smi is missing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCK_FIELDS)}", "--format=csv,noheader", "-i", "0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    values = answer.stdout.strip().split(", ")
    return dict(zip(CLOCK_FIELDS, values, strict=False)) if answer.returncode == 0 else {}


def commit() -> str:
    """Return the measured commit, from the file COMMIT that `dev gpu-bundle` writes, or else from git."""
    noted = Path(torch_flashplug.__file__).parents[1] / "COMMIT"
    if noted.exists():
        return noted.read_text().strip()
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu {platform.machine()}"


def slug(gpu: str) -> str:
    """Return a short name of a GPU for file names.

    "NVIDIA H100 80GB HBM3" becomes "h100". For two GPUs, "NVIDIA H100 80GB HBM3 x2" becomes "h100x2".
    """
    *parts, last = gpu.lower().split()
    several = last if re.fullmatch(r"x\d+", last) else ""
    for part in parts if several else [*parts, last]:
        if re.fullmatch(r"[a-z]+\d+[a-z]*", part):
            return part + several
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def header(suite: str, started_clocks: dict[str, str], commit_id: str) -> dict[str, object]:
    return {
        "suite": suite,
        "gpu": gpu_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "commit": commit_id,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join(sys.argv),
        "clocks": {"start": started_clocks, "end": read_clocks()},
    }


def write_json(document: dict[str, object], folder: Path) -> Path:
    return result_schema.write(document, folder / f"{document['suite']}-{slug(str(document['gpu']))}.json")


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.3f}"


def print_table(document: dict[str, object], console: Console | None = None) -> None:
    """Print a table with one line per row: our time, the time of every peer, and the ratio to the best peer."""
    console = console or Console(width=150)
    rows = document["rows"]
    derived = {name: label for name, label in DERIVED.items() if any(row.get(name) for row in rows)}
    peers = list(dict.fromkeys(name for row in rows for name in row["peers_ms"]))
    table = Table(title=f"{document['suite']} on {document['gpu']}, torch {document['torch']}; times in ms")
    table.add_column("case", no_wrap=True)
    one_order = list(dict.fromkeys(name for row in rows for name in row.get("one_order_ms", ())))
    timed = ("ours", "auto", *peers, *(f"{name}, one order" for name in one_order))
    for column in (*timed, "ratio", *derived.values(), "% of bound", "auto/stock", "auto plan"):
        table.add_column(column, justify="right")
    for row in rows:
        auto_cost = row.get("auto_over_stock")
        cells = [_milliseconds(row.get("ours_ms")), _milliseconds(row.get("auto_ms"))]
        cells += [_milliseconds(row["peers_ms"].get(peer)) for peer in peers]
        cells += [_milliseconds(row["one_order_ms"].get(name)) for name in one_order]
        cells += ["-" if row.get(name) is None else f"{row[name]:.3f}" for name in ("ratio", *derived)]
        bound = row.get("bound_ms")
        cells.append("-" if not bound or not row.get("ours_ms") else f"{100 * bound / row['ours_ms']:.0f}")
        color = "red" if auto_cost and auto_cost > LIMIT else "default"
        cells.append("-" if auto_cost is None else f"[{color}]{auto_cost:.3f}[/]")
        table.add_row(row["case"], *cells, row.get("auto_plan", "-"))
    console.print(table)
    console.print("ratio = time of the best peer / our time: above 1 we are faster.")
    for name, label in {"ratio": "ratio", **derived}.items():
        if ratios := [row[name] for row in rows if row.get(name)]:
            mean = statistics.geometric_mean(ratios)
            console.print(f"geometric mean of the column {label}: {mean:.3f}, lowest {min(ratios):.3f}")
    for name, reason in document.get("absent", {}).items():
        console.print(f"not measured: {name} ({reason})")
    for case, reason in document.get("skipped", {}).items():
        console.print(f"skipped: {case} ({reason})")


def print_classes(document: dict[str, object], console: Console) -> None:
    """Print the lowest ratio of each class of calls, as needed for a ChoiceRow with the bounds of the class."""
    table = Table(title="Lowest stock time / our time, by class; a ChoiceRow serves from 0.97 up")
    bounds = (0, 66, 132, 264, 528)
    for column in ("head dims", "mask", "query rows >=", *(f"tiles >= {tiles}" for tiles in bounds)):
        table.add_column(column, justify="right")
    for low, high in ((1, 64), (65, 96), (97, 128), (129, 160), (161, 192), (193, 256)):
        for mask in ("full", "causal"):
            rows = [row for row in document["rows"] if low <= row["d"] <= high and row["mask"] == mask and row["ratio"]]
            for least in sorted({row["s"] for row in rows}):
                cells = []
                for tiles in bounds:
                    ratios = [row["ratio"] for row in rows if row["s"] >= least and row["tiles"] >= tiles]
                    cells.append(f"{min(ratios):.3f} of {len(ratios)}" if ratios else "-")
                table.add_row(f"{low}..{high}", mask, str(least), *cells)
    console.print(table)


def plot(document: dict[str, object], labels: dict[str, str], path: Path) -> Path | None:
    """Draw and save the picture of a document.

    The result is None if the document has nothing to draw or matplotlib is missing. A printed line reports missing
    matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return None
    matplotlib.use("Agg")
    grids = dict.fromkeys(("forward", "backward", "train"), _plot_grid)
    draws = {**grids, "headdims": _plot_bars, "latency": _plot_bars, "host": _plot_host, "decode": _plot_decode,
             "masks": _plot_masks, "accuracy": _plot_accuracy, "groups": _plot_groups, "everyday": _plot_calls,
             "models": _plot_calls}  # fmt: skip
    draw = draws.get(str(document["suite"]), _plot_ratios)
    figure = draw(document, labels)
    return result_schema.save(figure, path) if figure else None


def _subject(document: dict[str, object]) -> str:
    both = "forward + backward"
    return {"backward": "backward", "train": both, "grad": both}.get(str(document["suite"]), "forward")


def _caption(document: dict[str, object]) -> str:
    names = ("gpu", "torch", "cudnn", "date", "commit")
    return "{}, torch {}, cuDNN {}, {}, commit {}".format(*(document[name] for name in names))


def _plot_grid(document, labels):
    """Plot throughput over sequence length, with one panel per head dim and mask."""
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["d"], row["mask"]) for row in document["rows"]))
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(7.2 * columns, 4.6 * lines), squeeze=False)
    for axis, (d, mask) in zip(axes.flat, panels, strict=False):
        rows = [row for row in document["rows"] if (row["d"], row["mask"]) == (d, mask)]
        names = list(dict.fromkeys(name for row in rows for name in row["all_ms"] if name != "stock"))
        for name in names:
            points = [(row["s"], row["flop"] / row["all_ms"][name] / 1e9) for row in rows if name in row["all_ms"]]
            bold = name in {"ours_fa3", "ours_fa2"}
            style = {"linewidth": 3 if bold else 1.3, "linestyle": "--" if name == "ours_auto" else "-"}
            axis.plot(
                *zip(*points, strict=True), marker="o", label=labels.get(name, name), zorder=3 if bold else 2, **style
            )
        axis.set(title=f"head dim {d}, {mask} mask", xlabel="sequence length (batch x length = 16384)",
                 ylabel=f"{_subject(document)}, TFLOP/s (higher is better)", xscale="log", ylim=(0, None))  # fmt: skip
        axis.set_xticks([row["s"] for row in rows], [str(row["s"]) for row in rows])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.suptitle(
        f"Attention {_subject(document)}, bf16, heads x head dim = 2048; median of interleaved rounds\n"
        + _caption(document)
    )
    figure.tight_layout()
    return figure


def _plot_bars(document, labels):
    """Plot the speed as a multiple of the speed of stock, with one group of bars per call."""
    import matplotlib.pyplot as plt

    rows = document["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["all_ms"] if name not in {"stock", "ours_auto"}))
    figure, axis = plt.subplots(figsize=(11, 0.32 * len(rows) * len(names) * 0.55 + 2.5))
    height = 0.85 / len(names)
    for i, name in enumerate(names):
        values = [row["all_ms"]["stock"] / row["all_ms"][name] if name in row["all_ms"] else 0 for row in rows]
        at = [y + height * i for y in range(len(rows))]
        bars = axis.barh(at, values, height, label=labels.get(name, name), zorder=3)
        axis.bar_label(bars, [f"{value:.2f}" if value else "no kernel" for value in values], fontsize=7, padding=2)
    titles = [f"{row['case']}  ({1e3 * row['all_ms']['stock']:.1f} us)" for row in rows]
    axis.set_yticks([y + 0.42 - height / 2 for y in range(len(rows))], titles, fontsize=8)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.invert_yaxis()
    axis.margins(x=0.1, y=0.02)
    axis.set_xlabel("speed as a multiple of F.sdpa without the plugin; its time follows the name (higher is better)")
    axis.set_title(f"Attention forward, bf16, suite {document['suite']}\n" + _caption(document))
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    return figure


def _plot_masks(document, labels):
    """Plot the speed as a multiple of the speed of stock, with one group of bars per kind of mask.

    Each head dim has a panel. The result is None if no call has MASKED_ROWS rows.
    """
    import matplotlib.pyplot as plt

    forwards = [row for row in document["rows"] if not row["grad"] and "_beside_" not in row["case"]]
    rows = [row for row in forwards if row["s"] == MASKED_ROWS]
    panels = [d for d in MASKED_DIMS if any(row["d"] == d for row in rows)]
    if not panels:
        return None
    kinds = list(dict.fromkeys(row["mask"] for row in rows))
    figure, axes = plt.subplots(len(panels), figsize=(1.5 + 0.95 * len(kinds), 2.9 * len(panels)), squeeze=False)
    for axis, d in zip(axes.flat, panels, strict=True):
        # If a call was timed twice, the last row counts, so that all bars of a group come from the same run.
        times = {row["mask"]: row["all_ms"] for row in rows if row["d"] == d and "stock" in row["all_ms"]}
        shown = [[name for name in MASKED_BARS if name in times.get(kind, ())] for kind in kinds]
        for name, color in MASKED_BARS.items():
            timed = [i for i, names in enumerate(shown) if name in names]
            if not timed:
                continue
            at = [i + 0.3 * (shown[i].index(name) - (len(shown[i]) - 1) / 2) for i in timed]
            speeds = [times[kinds[i]]["stock"] / times[kinds[i]][name] for i in timed]
            bars = axis.bar(at, speeds, 0.3, label=labels.get(name, name), color=color)
            axis.bar_label(bars, fmt="%.1f", fontsize=8)
        axis.axhline(1.0, color="black", linewidth=1, label="stock")
        axis.set_xticks(range(len(kinds)), [kind.replace("_", "\n") for kind in kinds], fontsize=9)
        axis.set(ylabel=f"head dim {d}", xlim=(-0.5, len(kinds) - 0.5))
        axis.margins(y=0.15)
    axes.flat[0].legend(fontsize=9, loc="upper left")
    figure.suptitle(
        f"Attention under a mask, forward, bf16, {MASKED_ROWS} rows and keys:\n"
        "speed as a multiple of F.sdpa without the plugin (higher is better)\n" + _caption(document),
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def _plot_accuracy(document, labels):
    """Plot the error over the speed of kernels alone, with one panel per head dim, at the longest timed length.

    The result is None if no kernel was timed alone.
    """
    import matplotlib.pyplot as plt

    rows = [row for row in document["rows"] if row["input"] == SHOWN and row.get("alone_ms")]
    rows = [row for row in rows if row["s"] == max(row["s"] for row in rows)]
    if not rows:
        return None
    figure, axes = plt.subplots(1, len(rows), figsize=(4.8 * len(rows), 4.6), sharey=True, squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=True):
        for name, ms in row["alone_ms"].items():
            speed, error = row["flop"] / ms / 1e9, 100 * row["errors"][name]
            axis.scatter(speed, error, s=60, color="tab:gray" if name.startswith("fa3") else "tab:blue", zorder=3)
            beside = (0, -15 if name == "fa3_fp8" else 7)  # the point of fa3_fp8_tensor is right above
            axis.annotate(name, (speed, error), beside, textcoords="offset points", ha="center", fontsize=8)
        axis.set(title=f"head dim {row['d']}", xlabel="TFLOP/s of the kernel alone", yscale="log")
        axis.margins(x=0.2, y=0.1)
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylabel("error, % (root mean square, relative)")
    figure.suptitle(f"8-bit attention, inputs with outliers, {rows[0]['s']} keys (right and low is better)\n"
                    + _caption(document), fontsize=10)  # fmt: skip
    figure.tight_layout()
    return figure


def _plot_decode(document, labels):
    """Plot the bytes of K and V read from memory per second, with one line of marks per case."""
    import matplotlib.pyplot as plt

    rows = [row for row in document["rows"] if row["state"] == "cold"] or document["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["all_ms"] if name != "ours_auto"))
    times = {name: [row["all_ms"].get(name) for row in rows] for name in names}
    times["a kernel that only reads"] = [row["bound_ms"] for row in rows]
    figure, axis = plt.subplots(figsize=(11, 0.24 * len(rows) + 2.5))
    for name, column in times.items():
        points = [(row["kv_bytes"] / ms * 1e-6, y) for y, (row, ms) in enumerate(zip(rows, column, strict=True)) if ms]
        bold = name in {"ours_fa3", "ours_fa2"}
        if points:
            x, y = zip(*points, strict=True)
            axis.scatter(x, y, s=60 if bold else 22, label=labels.get(name, name), zorder=3 + bold)
    titles = [f"{row['case']}  ({1e3 * row['ours_ms']:.1f} us)" for row in rows]
    axis.set_yticks(range(len(rows)), titles, fontsize=7)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.set(xlim=(0, None), xlabel="GB/s of K and V (higher is better); our time follows the name",
             title="Few query rows against many keys, K and V from memory\n" + _caption(document))  # fmt: skip
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure


def _plot_host(document, labels):
    """Plot host times, and times of everyday calls.

    The left panel has the host time per call. The right panel has the time of everyday calls with the plugin in auto
    mode, as a multiple of the time of stock.
    """
    import matplotlib.pyplot as plt

    costs = [row for row in document["rows"] if row["kind"] == "host"]
    calls = [row for row in document["rows"] if row["kind"] == "everyday"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, max(4.5, 0.3 * len(calls))), width_ratios=(1, 1.6))
    names = list(dict.fromkeys(name for row in costs for name in row["all_ms"]))
    for i, name in enumerate(names):
        values = [row["all_ms"].get(name, 0) * 1e3 for row in costs]
        at = [x + 0.8 * i / len(names) for x in range(len(costs))]
        bars = left.bar(at, values, 0.8 / len(names), label=labels.get(name, name))
        left.bar_label(bars, fmt="%.1f", fontsize=8)
    cases = [row["case"].removeprefix("host_").replace("_", "\n") for row in costs]
    left.set_xticks([x + 0.4 - 0.4 / max(len(names), 1) for x in range(len(costs))], cases)
    left.set(
        title="Host time of one F.sdpa call: 1x8x128x64; decode: 1x32x8, 1x1024x128",
        ylabel="microseconds (lower is better)",
    )
    left.margins(y=0.25)
    left.legend(fontsize=8, loc="upper left", ncols=len(names))
    ratios = [row["auto_over_stock"] or 0 for row in calls]
    colors = ["tab:red" if ratio > LIMIT else "tab:green" if ratio < 0.97 else "tab:gray" for ratio in ratios]
    right.barh([row["case"] for row in calls], ratios, color=colors)
    right.axvline(1.0, color="black", linewidth=1)
    right.axvline(LIMIT, color="tab:red", linewidth=1, linestyle="--", label=f"promise: at most {LIMIT}")
    right.invert_yaxis()
    right.set(
        title="Everyday calls: time in auto mode / time without the plugin", xlabel="below 1: the plugin is faster"
    )
    right.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08 - 0.6 / max(len(calls), 1)))
    figure.suptitle(_caption(document))
    figure.tight_layout()
    return figure


def _plot_calls(document, labels):
    """Plot the ratios to the best peer of each call: time, device time and energy, where measured."""
    import matplotlib.pyplot as plt

    rows = document["rows"]
    columns = {"ratio": "time", "device_ratio": "device time", "energy_ratio": "energy"}
    figure, axis = plt.subplots(figsize=(9, 0.2 * len(rows) + 2.5))
    for (column, label), marker in zip(columns.items(), "osD", strict=True):
        points = [(row[column], y) for y, row in enumerate(rows) if row.get(column)]
        if points:
            axis.scatter(*zip(*points, strict=True), label=label, marker=marker, s=25)
    titles = [f"{row['case']}  ({1e3 * row['ours_ms']:.1f} us)" for row in rows]
    axis.set_yticks(range(len(rows)), titles, fontsize=7)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.invert_yaxis()
    axis.margins(y=0.02)
    axis.set(xlabel="best peer / plugin in auto mode (above 1: the plugin is better)",
             title=f"Suite {document['suite']}\n" + _caption(document))  # fmt: skip
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


def _plot_groups(document, labels):
    """Plot the time of ungrouped heads divided by the time of grouped heads, with one panel per mask.

    The result is None if no row has a time of ungrouped heads.
    """
    import matplotlib.pyplot as plt

    rows = [row for row in document["rows"] if row.get("grouped_over_ungrouped")]
    if not rows:
        return None
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    figure, axes = plt.subplots(1, len(masks), figsize=(6.5 * len(masks), 5), sharey=True, squeeze=False)
    for axis, mask in zip(axes.flat, masks, strict=True):
        panel = [row for row in rows if row["mask"] == mask]
        places = list(dict.fromkeys(tuple(row["shape"][:4]) for row in panel))
        for d in sorted({row["d"] for row in panel}):
            points = [(places.index(tuple(row["shape"][:4])), row["grouped_over_ungrouped"])
                      for row in panel if row["d"] == d]  # fmt: skip
            axis.scatter(*zip(*points, strict=True), label=f"head dim {d}", s=25)
        names = [f"{b} x {s}, {heads} on {kv_heads}" for b, heads, kv_heads, s in places]
        axis.set_xticks(range(len(places)), names, rotation=60, ha="right", fontsize=7)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.axhline(UNGROUPED_LIMIT, color="tab:red", linestyle="--", linewidth=1, label=f"aim: {UNGROUPED_LIMIT}")
        axis.set_title(f"{mask} mask")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes.flat[0].set_ylabel("ungrouped time / grouped time")
    figure.suptitle("Forward + backward of grouped heads, batch x length and heads\n" + _caption(document), fontsize=10)
    figure.tight_layout()
    return figure


def _plot_ratios(document, labels):
    """Plot stock's time divided by our time over the problem size, to show the classes of calls worth serving."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 6))
    for d, mask in dict.fromkeys((row["d"], row["mask"]) for row in document["rows"]):
        points = [
            (row["flop"] / 1e9, row["ratio"])
            for row in document["rows"]
            if (row["d"], row["mask"]) == (d, mask) and row["ratio"]
        ]
        if points:
            axis.scatter(*zip(*points, strict=True), label=f"head dim {d}, {mask}", s=25)
    axis.axhline(1.0, color="black", linewidth=1)
    axis.axhline(0.97, color="tab:red", linestyle="--", linewidth=1, label="served from 0.97 up")
    subject = _subject(document)
    axis.set(xscale="log", xlabel="GFLOP of the forward pass", ylabel=f"stock time / our time, {subject}",
             title="Our forward, forced, against F.sdpa without the plugin\n" + _caption(document))  # fmt: skip
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def main() -> None:
    from tools.bench import baselines

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON files that tools/bench/bench.py wrote")
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: next to each file)")
    options = parser.parse_args()
    for path in options.files:
        picture = (options.out or path.parent) / f"{path.stem}.png"
        if plot(result_schema.read(path), baselines.labels(), picture):
            print("wrote", picture)


if __name__ == "__main__":
    main()
