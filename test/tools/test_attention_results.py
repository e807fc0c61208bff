"""Tables of pages, block masks and several GPUs, against the kept results."""

from __future__ import annotations

import statistics

from test_results import ROOT, rows_of, table


def lines_under(heading: str) -> list[list[str]]:
    """Return the cells of the table under a smaller heading of docs/benchmarks.md, without header and rule."""
    part = (ROOT / "docs" / "benchmarks.md").read_text().split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def test_table_of_pages_equals_the_results():
    lines = lines_under("Pages")
    rows = rows_of("paged-h100")
    assert len(lines) == len(rows)
    for (call, *cells), row in zip(lines, rows, strict=True):
        B, Hq, Hkv, _, Sk, D, _ = row["shape"]
        times, contiguous_ms = row["all_ms"], row["all_ms"]["ours_contiguous"]
        ratios = [contiguous_ms / times[name] for name in ("ours_fa2", "ours_page64", "ours_page256", "ours_lengths")]
        ratios.append(min(row["peers_ms"].values()) / row["ours_ms"])
        assert call == f"{B} x {Hq} x {Hkv} x {Sk}, D {D}"
        megabytes, microseconds = row["kv_bytes"] >> 20, 1000 * contiguous_ms
        assert cells == [str(megabytes), f"{microseconds:.1f}", *(f"{ratio:.2f}" for ratio in ratios)]


def test_table_of_block_masks_equals_the_results():
    lines = lines_under("Block masks")
    rows = rows_of("blocks-h100")
    assert len(lines) == len(rows)
    for (call, *cells), row in zip(lines, rows, strict=True):
        direction, mask, _, _ = row["case"].split("_")
        assert call == f"{direction} {mask}, D {row['d']}, {row['s'] // 1024}k"
        over_flex = row["peers_ms"]["flex"] / row["ours_ms"]
        assert cells == [f"{row['ours_ms']:.3g}", f"{over_flex:.2f}", f"{row['rate']:.2f}"]


def test_table_of_several_gpus_equals_the_results():
    table_rows = table("docs/several_gpus.md", "Measured")
    *rings, block = rows_of("multi-h200x2")
    assert len(table_rows) == len(rings)
    for (call, plugin_cell, *cells), row in zip(table_rows, rings, strict=True):
        peers, memory = row["peers_ms"], row["peak_mib"]
        ratios = [f"{peers[name] / row['ours_ms']:.2f}" for name in ("stock", "stock_flash")]
        steps = f"{row['steps_ms'] / row['ours_ms']:.2f}" if "steps_ms" in row else "-"
        assert (call, plugin_cell) == (row["case"], f"{row['ours_ms']:.4g}")
        assert cells == [*ratios, steps, f"{memory['ours_auto'] / memory['stock']:.2f}"]
    page = (ROOT / "docs" / "several_gpus.md").read_text()
    page = " ".join(page.split())
    local, *stocks = (f"{block['all_ms'][name]:.2f}" for name in ("ours_local", "stock", "stock_local"))
    plugin_cell = f"take {block['ours_ms']:.2f} ms with heads as DTensors, {local} as plain tensors"
    assert f"{plugin_cell}; without the plugin {' and '.join(stocks)}." in page
    (gather,) = (row["variants_ms"]["gather"] for row in rings if row["case"] == "train_ring_allgather_s65536")
    assert f"the same call takes {gather:.1f} ms" in page


def test_text_about_the_second_fa3_wheel_equals_the_results():
    windows, h100_windows = (
        [row["peers_ms"]["fa3"] / row["ours_ms"] for row in rows_of(name)]
        for name in ("window-h200", "window-fa3-h100")
    )
    pages = [min(row["peers_ms"].values()) / row["ours_ms"] for row in rows_of("paged-h200")]
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert len(windows) == len(h100_windows) == 15 and len(pages) == 9
    means = [f"{statistics.geometric_mean(ratios):.2f} on average of the" for ratios in (windows, pages, h100_windows)]
    lowest, second = sorted(h100_windows)[:2]
    assert f"{means[0]} 15 windows without gradients, lowest {min(windows):.2f} (D 256, 128 keys)" in page
    assert f"{means[1]} nine calls below, lowest {min(pages):.2f}" in page
    remaining_text = f"lowest {lowest:.2f} (D 256, 128 keys), the other 14 above {int(100 * second) / 100:.2f}"
    assert f"{means[2]} 15 without gradients, {remaining_text}" in page


def test_text_about_sequence_lengths_against_fa3_equals_the_results():
    phrases = []
    for part, label in (("equal", "equal lengths"), ("zipf", "Zipf lengths"), ("short", "short lengths")):
        rows = [row for row in rows_of("ragged-fa3-h100") if row["case"].startswith(f"fwd_{part}")]
        ratios = [row["peers_ms"]["fa3"] / row["ours_ms"] for row in rows]
        phrases.append(f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f}) for {label}")
    assert f"is {', '.join(phrases)}. Below" in " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())


def test_text_about_softcap_cost_equals_the_results():
    times = {row["case"]: row["all_ms"] for row in rows_of("softcap-plain-h100")}
    phrases = []
    for D in (64, 128, 256):
        ratios = (times[f"fwd_softcap_d{D}_s{S}"] for S in (2048, 8192))
        phrases.append(f"D {D} " + " and ".join(f"{x['ours_without_feature'] / x['ours_fa3']:.2f}" for x in ratios))
    assert f"2k and 8k: {', '.join(phrases)}." in " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
