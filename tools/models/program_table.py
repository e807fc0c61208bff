"""Summary of a run of programs.py: the rows with too large errors, the totals, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from math import nan

from rich.console import Console
from rich.table import Table

from tools.bench import result_schema
from tools.models.program_models import Record

BAR = 1.1  # largest allowed error with the plugin, as a multiple of the error of stock alone
SLOWER = 1.03  # time with the plugin from which a scenario is reported, as a multiple of the time of stock


def violations(rows: Iterable[Record]) -> list[str]:
    """Return a line for each error of more than BAR times the error of stock.

    If the run has measured the math backend, the line also has the error of math, for comparison with the plain
    formula.
    """
    text = "{program} {scenario} {order}: {what} {ours:.3g}, stock alone {stock:.3g}, its math {math:.3g}"
    return [
        text.format(**row, what=measure, ours=ours, stock=row[f"{measure}_stock"], math=row.get(f"{measure}_math", nan))
        for row in rows
        for measure in ("error", "mean")
        if (ours := row.get(f"{measure}_ours", 0.0)) > BAR * row.get(f"{measure}_stock", 0.0)
    ]


def totals(rows: Sequence[Record]) -> Record:
    """Return totals over the rows of a single order. Both orders make equal calls, and times are measured once."""
    once = [row for row in rows if row["order"] == rows[0]["order"]]
    timed = [row for row in once if "stock_ms" in row]
    calls, attention = sum(row["calls"] for row in once), sum(row["attention_stock_ms"] for row in timed)
    summary: Record = {"calls": calls, "calls_served": sum(row["served"] for row in once) / max(calls, 1)}
    if timed:
        summary["attention_time_served"] = sum(row["attention_stock_ms_served"] for row in timed) / attention
    ratios = [row["ours_over_stock"] for row in timed if "ours_over_stock" in row]
    if ratios:
        summary["ours_over_stock_ms"] = statistics.geometric_mean(ratios)
    return summary


def slower(rows: Sequence[Record]) -> list[str]:
    """Return the scenarios that take more than SLOWER times the time of stock.

    The ratio is the median of paired rounds. Each line also has the spread of the rounds.
    """
    once = [row for row in rows if row["order"] == rows[0]["order"] and row.get("ours_over_stock", 0.0) > SLOWER]
    return ["{program} {scenario}: {ours_over_stock:.3f} (spread {spread:.3f})".format(**row) for row in once]


def print_table(document: Record, console: Console) -> None:
    table = Table(title="programs on {gpu}, torch {torch}, transformers {transformers}".format(**document))
    for column in ("program", "scenario", "order", "D", "served"):
        table.add_column(column, no_wrap=True)
    numbers = [f"{measure}_{side}" for measure in ("error", "mean", "tokens") for side in ("stock", "math", "ours")]
    numbers += ["stock_ms", "ours_ms"]
    for column in (*numbers, "why not"):
        justify = "right" if column in numbers else "left"
        table.add_column(column.replace("_", " "), justify=justify, no_wrap=column == "why not")
    for row in document["rows"]:
        color = "red" if violations([row]) else "default"
        why = max(row["reasons"], key=row["reasons"].__getitem__, default="") if row["served"] < row["calls"] else ""
        cells = [row["program"], row["scenario"], row["order"], row["dims"], f"{row['served']}/{row['calls']}"]
        cells += [f"[{color}]{row[name]:.3g}[/]" if name in row else "-" for name in numbers]
        table.add_row(*cells, why[:36])
    console.print(table)
    lines = [f"absent: {program} ({reason})" for program, reason in document["absent"].items()]
    for row in (row for row in document["rows"] if {"wrong_stock", "wrong_ours"} & set(row)):
        sides = f"stock alone {row.get('wrong_stock', [])}, with the plugin {row.get('wrong_ours', [])}"
        lines.append(f"wrong: {row['program']} {row['scenario']} {row['order']}: {sides}")
    lines += [f"failed: {failure}" for failure in document["failed"]]
    lines += [f"violation: {line}" for line in document["violations"]]
    lines += [f"slower: {line}" for line in slower(document["rows"])]
    for line in (*lines, f"totals: {result_schema.rounded(document['totals'])}"):
        console.print(line, markup=False)
