"""The form in which results are kept: JSON with four significant digits, a row a line, without the columns that follow
from others; pictures in few colours. Standard library, and pillow for pictures.
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
PICTURE_BYTES = 150_000  # at most
FOLDER_BYTES = 3_000_000  # all of tools/results; suites to come bring some 60 kB each
COLOURS = 64  # the most frequent ones
DPI = (80, 65, 50)  # the first that keeps a picture small enough
GRADIENT_FLOP = {"bwd": 2.5, "train": 3.5}  # over a forward's: five and seven products where that has two
OURS = ("ours_fa3", "ours_fa2", "ours_auto", "ours_tall")  # the first that was timed is held against the others
PLAIN = "ours_plain"  # ours without what a suite is about: no peer, and nothing to be checked
AGREED = ("case", "ours_ms", "peers_ms", "ratio", "spread")  # every row of a benchmark has them


def rounded(value: object) -> object:
    """Numbers with four significant digits; JSON knows neither NaN nor infinity."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(name): rounded(entry) for name, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _ours(row: Record) -> str | None:
    return next((name for name in OURS if name in row["spread"]), None)


def _told(row: Record) -> dict[str, float]:
    """Times that stand in columns of their own."""
    auto = {"ours_auto": row["auto_ms"]} if row.get("auto_ms") else {}
    one_order = {f"{name}_det": ms for name, ms in row.get("one_order_ms", {}).items()}
    return {_ours(row): row["ours_ms"], **auto, **row["peers_ms"], **one_order}


def _following(row: Record) -> Record:
    """Columns of a benchmark's row that follow from others."""
    times, more = _told(row) | row.get("other_ms", {}), {}
    if "shape" in row:
        b, heads, _, s, keys, *dims = row["shape"]
        directions = next((factor for part, factor in GRADIENT_FLOP.items() if part in row["case"]), 1.0)
        flop = 2.0 * b * heads * s * keys * sum(dims) * directions * (0.5 if row["mask"] == "causal" else 1.0)
        more = {"d": max(dims), "s": s, "flop": rounded(flop)}
    best = min(row["peers_ms"], key=row["peers_ms"].get, default=None)
    more["all_ms"] = {name: times[name] for name in row["spread"] if name in times}
    return {"ours": _ours(row), "best_peer": best, **more}


def lean(row: Record) -> Record:
    """A row without what `full` can say again, and without what is empty."""
    if "peers_ms" not in row:
        return row
    times = row.get("all_ms", {})
    row = {name: entry for name, entry in row.items() if name in AGREED or entry not in (None, {}, [])}
    if others := {name: ms for name, ms in times.items() if name not in _told(row)}:
        row["other_ms"] = others
    following = _following(row)
    return {name: entry for name, entry in row.items() if name in AGREED or following.get(name) != entry}


def full(row: Record) -> Record:
    return row | _following(row) | row if "peers_ms" in row else row  # its own columns come first, and count


def text_of(document: Record) -> str:
    """What holds rows, or one entry for each call, has one a line."""
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


def read(path: Path) -> Record:
    """With the columns that follow from others."""
    document = json.loads(path.read_text())
    return document | {"rows": [full(row) for row in document["rows"]]} if "rows" in document else document


def save(figure: Figure, path: Path) -> Path:
    """A picture in few colours, drawn smaller where it would be large."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for dpi in DPI:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=dpi, bbox_inches="tight")
        small = in_few_colours(drawn)
        if len(small) <= PICTURE_BYTES:
            break
    path.write_bytes(small)
    return path


def in_few_colours(picture: io.BytesIO | Path) -> bytes:
    """A picture as PNG; a colour that is not among its most frequent ones becomes the nearest of them."""
    from PIL import Image

    image, palette, small = Image.open(picture).convert("RGB"), Image.new("P", (1, 1)), io.BytesIO()
    frequent = sorted(image.getcolors(image.width * image.height), reverse=True)[:COLOURS]
    palette.putpalette([channel for _, colour in frequent for channel in colour])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()
