"""File formats of benchmark results: JSON with four significant digits, and pictures with few colors.

The JSON has one line for each row. Columns that can be derived from the remaining columns are left out. The module
needs only the standard library, and pillow for pictures.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, object]

DIGITS = 4
PICTURE_BYTES = 150_000  # largest size of a picture
FOLDER_BYTES = 3_000_000  # largest size of tools/results; each future suite adds about 60 kB
COLORS = 64  # a picture keeps the 64 most frequent colors
DPI = (80, 65, 50)  # the first resolution with a small enough picture is used
GRADIENT_FLOP = {"bwd": 2.5, "train": 3.5}  # FLOP relative to forward: five and seven matrix products instead of two
OURS = ("ours_fa3", "ours_fa2", "ours_auto", "ours_tall")  # the first timed name is compared with the peers
WITHOUT_FEATURE = "ours_without_feature"  # ours without the feature of the suite: neither a peer nor checked
UNGROUPED = "ours_ungrouped"  # ours with as many KV heads as query heads, in column "ungrouped_ms"
# Columns with raw numbers by provider -> ratio of the best peer's number and the number of ours, derived on reading.
RATIOS = {"device_ms": "device_ratio", "energy_j": "energy_ratio"}
REQUIRED_COLUMNS = ("case", "ours_ms", "peers_ms", "ratio", "spread")  # columns of every benchmark row


def rounded(value: object) -> object:
    """Round all numbers in a value to four significant digits.

    NaN and infinity become strings, because JSON has neither.
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): rounded(entry) for name, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _ours(row: Record) -> str | None:
    return next((name for name in OURS if name in row["spread"]), None)


def _times_with_columns(row: Record) -> dict[str, float]:
    """Return the times that have separate columns."""
    auto = {"ours_auto": row["auto_ms"]} if row.get("auto_ms") else {}
    one_order = {f"{name}_det": ms for name, ms in row.get("one_order_ms", {}).items()}
    return {_ours(row): row["ours_ms"], **auto, **row["peers_ms"], **one_order}


def _ratios(row: Record) -> Record:
    """Return the ratios of raw columns; above 1, ours takes less time or energy than the compared call."""
    ours, ratios = _ours(row), {}
    for column, name in RATIOS.items():
        numbers = row.get(column, {})
        peers = [number for provider, number in numbers.items() if provider not in OURS]
        if peers and ours in numbers:
            ratios[name] = min(peers) / numbers[ours]
    if row.get("ungrouped_ms") and row["ours_ms"]:
        ratios["grouped_over_ungrouped"] = row["ungrouped_ms"] / row["ours_ms"]
    return rounded(ratios)


def _following(row: Record) -> Record:
    """Return the columns of a benchmark row that can be derived from the remaining columns."""
    times, more = _times_with_columns(row) | row.get("other_ms", {}), _ratios(row)
    if "shape" in row:
        b, heads, _, s, keys, *dims = row["shape"]
        directions = next((factor for part, factor in GRADIENT_FLOP.items() if part in row["case"]), 1.0)
        flop = 2.0 * b * heads * s * keys * sum(dims) * directions * (0.5 if row["mask"] == "causal" else 1.0)
        more |= {"d": max(dims), "s": s, "flop": rounded(flop)}
    best = min(row["peers_ms"], key=row["peers_ms"].get, default=None)
    more["all_ms"] = {name: times[name] for name in row["spread"] if name in times}
    return {"ours": _ours(row), "best_peer": best, **more}


def lean(row: Record) -> Record:
    """Return a row without the columns that `full` can restore, and without empty columns."""
    if "peers_ms" not in row:
        return row
    times = row.get("all_ms", {})
    row = {name: entry for name, entry in row.items() if name in REQUIRED_COLUMNS or entry not in (None, {}, [])}
    if further_ms := {name: ms for name, ms in times.items() if name not in _times_with_columns(row)}:
        row["other_ms"] = further_ms
    following = _following(row)
    return {name: entry for name, entry in row.items() if name in REQUIRED_COLUMNS or following.get(name) != entry}


def full(row: Record) -> Record:
    return row | _following(row) | row if "peers_ms" in row else row  # the columns of `row` come first and win


def text_of(document: Record) -> str:
    """Return the JSON text of a document. Lists and dicts of rows or calls have one entry per line."""
    lines = []
    for name, value in rounded(document).items():
        if name == "rows":
            value = [lean(row) for row in value]  # noqa: PLW2901
        entries, ends = [], "[]"
        if isinstance(value, list):
            entries = [_line(entry) for entry in value]
        elif isinstance(value, dict) and any(isinstance(entry, dict | list) for entry in value.values()):
            entries, ends = [f"{json.dumps(key)}: {_line(entry)}" for key, entry in value.items()], "{}"
        body = ",\n".join(entries)
        lines.append(f"{json.dumps(name)}: " + (f"{ends[0]}\n{body}\n{ends[1]}" if entries else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(entry: object) -> str:
    return json.dumps(entry, separators=(",", ":"))


def write(document: Record, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(document))
    return path


def with_derived_columns(document: Record) -> Record:
    return document | {"rows": [full(row) for row in document["rows"]]} if "rows" in document else document


def read(path: Path) -> Record:
    """Read a document, and add the derived columns to the rows."""
    return with_derived_columns(json.loads(path.read_text()))


def save(figure: Figure, path: Path) -> Path:
    """Save a figure as a PNG with few colors, at a lower resolution if the file would be too large."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for dpi in DPI:
        picture_bytes = io.BytesIO()
        figure.savefig(picture_bytes, dpi=dpi, bbox_inches="tight")
        small = with_few_colors(picture_bytes)
        if len(small) <= PICTURE_BYTES:
            break
    path.write_bytes(small)
    return path


def with_few_colors(picture: io.BytesIO | Path) -> bytes:
    """Return a picture as PNG. Each color becomes the nearest of the most frequent colors."""
    from PIL import Image

    image, palette, small = Image.open(picture).convert("RGB"), Image.new("P", (1, 1)), io.BytesIO()
    frequent = sorted(image.getcolors(image.width * image.height), reverse=True)[:COLORS]
    palette.putpalette([channel for _, color in frequent for channel in color])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()
