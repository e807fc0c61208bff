"""tools/results: form and size of the files, and the tables of README and docs.

Every file has the agreed form, as the tools write it. Pictures can be drawn from the files alone. The tables must equal
the results.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import geometric_mean

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tools.bench import result_schema  # noqa: E402

RESULTS = ROOT / "tools" / "results"
FILES = sorted(RESULTS.glob("*.json"))


# Programs with more than 1.1 times the error of stock, named in docs/benchmarks.md, and the allowed factor.
KNOWN = {"bert train": 1.2, "bert compiled_train": 2.4, "electra train_left": 1.2, "hubert train_right": 1.2}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kept_results_have_the_agreed_form(path):
    document = json.loads(path.read_text())
    if "suite" not in document:
        pytest.skip("not a benchmark's file")
    assert {"gpu", "torch", "cudnn", "commit", "clocks"} <= set(document)
    if document["suite"] == "fuzz":
        assert min(document["calls"].values()) > 1000 and document["findings"] == []
        return
    if document["suite"] == "programs":
        assert document["failed"] == [] and len(document["rows"]) > 500
        assert {violation.rsplit(": ", 1)[0].rsplit(" ", 1)[0] for violation in document["violations"]} == set(KNOWN)
        for row in document["rows"]:
            max_factor = KNOWN.get(f"{row['program']} {row['scenario']}", 1.1)
            assert all(
                row[f"{error_kind}_ours"] <= max_factor * row[f"{error_kind}_stock"]
                for error_kind in ("error", "mean")
                if f"{error_kind}_ours" in row
            )
            assert {"program", "scenario", "order", "calls", "served", "reasons"} <= set(row)
        return
    assert document["rounds"] >= 7
    if document["suite"] == "gate":  # only times of the plugin: call -> state -> splits -> microseconds
        assert document["facts"]["sm_count"] > 0
        times = [
            us
            for states in document["us"].values()
            for times_by_split in states.values()
            for us in times_by_split.values()
        ]
        assert len(times) > 100 and min(times) > 0
        return
    for row in document["rows"]:
        assert {"case", "ours_ms", "peers_ms", "ratio", "spread"} <= set(row)


def floats_in(value: object) -> list[float]:
    if isinstance(value, dict | list):
        return [
            number for entry in (value.values() if isinstance(value, dict) else value) for number in floats_in(entry)
        ]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kept_results_equal_the_output_of_the_tools(path):
    """Check one row per line, four significant digits, and no derived values."""
    text = path.read_text()
    assert text == result_schema.text_of(result_schema.read(path))
    document = json.loads(text)
    assert all(number == float(f"{number:.4g}") for number in floats_in(document))
    for row in document.get("rows", ()):
        assert f"\n{json.dumps(row, separators=(',', ':'))}" in text


def test_results_are_small():
    pictures = {path.name: path.stat().st_size for path in RESULTS.glob("*.png")}
    assert pictures and max(pictures.values()) <= result_schema.PICTURE_BYTES, pictures
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= result_schema.FOLDER_BYTES
    assert {path.suffix for path in files} == {".json", ".png", ".txt"}


EXPERIMENTS = sorted((ROOT / "docs" / "experiments").glob("*.md"))
TOPICS = {page.stem for page in EXPERIMENTS} - {"README"}


def test_lines_of_experiments_are_short():
    assert not [line for page in EXPERIMENTS for line in page.read_text().splitlines() if len(line) > 120]


def test_decisions_name_a_topic_a_date_and_an_outcome():
    page = (ROOT / "docs" / "experiments" / "README.md").read_text()
    table = page.split("## Decisions\n", 1)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:5] == "| 202"]
    dates = [row[0] for row in rows]
    assert len(rows) > 200 and dates == sorted(dates, reverse=True)
    assert all(len(row) == 5 and all(row) for row in rows)
    assert {row[1] for row in rows} == TOPICS and {row[4] for row in rows} == {"yes", "no", "measured"}


def test_each_decision_has_an_entry_on_the_page_of_its_topic():
    page = (ROOT / "docs" / "experiments" / "README.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:5] == "| 202"]
    texts = {path.stem: " ".join(path.read_text().split()) for path in EXPERIMENTS}
    assert not [row for row in rows if f"**{row[2]}** ({row[0]})" not in texts[row[1]]]


# A row of the harness: two kernels of the plugin, one of them in auto; a peer; both again in deterministic mode.
ROW = {
    "case": "train_d64_causal_s512", "ours_ms": 1 / 3, "ours": "ours_fa3", "peers_ms": {"stock": 2 / 3, "fa2": 1.5},
    "one_order_ms": {"ours_fa3": 0.7}, "ratio": 2.00049, "best_peer": "stock",
    "spread": {"ours_auto": 0.1, "ours_fa3": 0.2, "ours_fa2": 0.1, "stock": 0.0, "ours_fa3_det": 0.0, "fa2": 0.1},
    "auto_ms": 0.31, "auto_over_stock": 0.5,
    "all_ms": {"ours_auto": 0.31, "ours_fa3": 1 / 3, "ours_fa2": 0.4, "stock": 2 / 3, "ours_fa3_det": 0.7, "fa2": 1.5},
    "shape": [32, 32, 32, 512, 512, 64, 64], "d": 64, "s": 512, "mask": "causal", "dtype": "bf16",
    "flop": 3.5 * 2 * 32 * 32 * 512 * 512 * 128 / 2, "errors": {}, "refused": {}, "bound_ms": None,
}  # fmt: skip


def test_written_rows_omit_derived_values_and_lose_nothing(tmp_path):
    document = {"suite": "train", "rounds": 7, "absent": {}, "rows": [ROW, ROW]}
    path = result_schema.write(document, tmp_path / "a" / "b.json")
    kept = json.loads(path.read_text())
    assert not {"ours", "all_ms", "best_peer", "d", "s", "flop", "errors", "refused", "bound_ms"} & set(kept["rows"][0])
    assert kept["rows"][0]["other_ms"] == {"ours_fa2": 0.4} and kept["rows"][0]["ours_ms"] == 0.3333
    expected = {name: value for name, value in result_schema.rounded(ROW).items() if value not in (None, {})}
    for row in result_schema.read(path)["rows"]:
        assert expected.items() <= row.items() and list(row["all_ms"]) == list(ROW["all_ms"])
    assert len(path.read_text().splitlines()) == len(
        ("{", "suite", "rounds", "absent", "rows", *kept["rows"], "]", "}")
    )


def test_nan_and_infinity_are_written_as_words():
    rounded = result_schema.rounded([float("nan"), float("inf"), 12345, 1.23456, True])
    assert rounded == ["nan", "inf", 12345, 1.235, True]


@pytest.mark.parametrize("name", ["forward", "fa2", "headdims", "host", "decode", "train", "masks", "accuracy"])
def test_pictures_are_drawn_only_from_files(name, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    from tools.bench import baselines, report

    document = result_schema.read(RESULTS / f"{name}-h100.json")
    picture = report.plot(document, baselines.labels(), tmp_path / "picture.png")
    pyplot.close("all")
    assert 5_000 < picture.stat().st_size <= result_schema.PICTURE_BYTES


# ---- quotes on pages ----


def test_quoted_files_are_kept():
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    quoted = {name for page in pages for name in re.findall(r"[\w-]+-h\d00\.(?:json|png|txt)", page.read_text())}
    assert len(quoted) > 10 and not [name for name in quoted if not (RESULTS / name).exists()]


def rows_of(name: str) -> list[dict]:
    return result_schema.read(RESULTS / f"{name}.json")["rows"]


def grid_of_masks(gpu: str) -> list[dict]:
    """Return the rows of the grid, without additional masks and without repeated rows for FlexAttention's FLASH."""
    return [row for row in rows_of(f"masks-{gpu}") if not re.search("_beside_|_flash_", row["case"])]


def ratios_to_best_peer(rows: list[dict]) -> list[float]:
    return [row["ratio"] for row in rows]


def ratios_to_peer(peer: str, rows: list[dict]) -> list[float]:
    return [row["peers_ms"][peer] / row["ours_ms"] for row in rows if peer in row["peers_ms"]]


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without header and rule."""
    text = (ROOT / page).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def test_table_of_all_suites_equals_the_results():
    table_rows = table("docs/benchmarks.md", "All suites")
    assert len(table_rows) == 14
    for name, calls, *numbers in table_rows:
        rows = rows_of(name)
        sides = [ratios_to_best_peer(rows), ratios_to_peer("stock", rows)]
        means = [(f"{geometric_mean(side):.3f}", f"{min(side):.3f}") if side else ("-", "-") for side in sides]
        assert [calls, *numbers] == [str(len(rows)), *means[0], *means[1]], name


def test_table_of_forwards_equals_the_results():
    rows = {(f"{row['d']} {row['mask']}", row["s"]): row for row in rows_of("forward-h100")}
    peers, case = ("**ours**", "cuDNN 9.19 (stock default)", "FA3 wheel", "FA4 wheel"), ""
    table_rows = table("docs/benchmarks.md", "Forward")
    assert len(table_rows) == 6 * len(peers)
    for label, peer_label, *rates in table_rows:
        case = label or case
        for s, rate in zip((512, 1024, 2048, 4096, 8192, 16384), rates, strict=True):
            row = rows[case, s]
            ms = (row["ours_ms"], *(row["peers_ms"][peer] for peer in ("stock", "fa3", "fa4")))[peers.index(peer_label)]
            assert rate == f"{row['flop'] / ms / 1e9:.0f}", (case, peer_label, s)


FLOATS = {
    "(1, 1, S, S)": "bias_one", "by head, (1, H, S, S)": "bias_heads", "all four dims": "bias_all",
    "padding, (B, 1, 1, S)": "bias_keys", "by head, last dim not contiguous (T5)": "bias_t5",
    "fp32, (1, 1, S, S)": "bias_fp32", "by head, its gradient too": "bias_learned",
    "all four dims, its gradient too": "bias_learned_all", "all": "bias_",
}  # fmt: skip


def mean_and_range(sides: list[float]) -> str:
    """Return the geometric mean, the minimum and the maximum as text."""
    return ", ".join(f"{x:.3g}" if x >= 10 else f"{x:.2f}" for x in (geometric_mean(sides), min(sides), max(sides)))


def test_table_of_float_masks_equals_the_results():
    rows, wide = ([row for row in grid_of_masks(gpu) if row["mask"].startswith("bias_")] for gpu in ("h100", "h200"))
    sides = [[row for row in rows if row["grad"] == grad] for grad in (False, True)]
    assert wide and all(row["grad"] and row["shape"][5] == 256 for row in wide)
    table_rows = table("docs/benchmarks.md", "Float masks")
    assert {label for label, *_ in table_rows} == set(FLOATS)
    for label, *cells in table_rows:
        for side, cell in zip((*sides, wide), cells, strict=True):
            label_rows = [row for row in side if row["mask"] == FLOATS[label] or label == "all"]
            assert cell == (mean_and_range(ratios_to_peer("stock", label_rows)) if label_rows else "-"), label


BOOLS = {
    "random, (1, 1, S, S)": "random", "all true": "all", "causal": "tril", "window of 1024": "window",
    "8 documents, (B, 1, S, S)": "documents", "random by head": "per_head",
    "padding, (B, 1, S, S)": "padding", "padding, (B, 1, 1, S)": "padding_row",
}  # fmt: skip


def test_table_of_bool_masks_equals_the_results():
    rows = {gpu: [row for row in grid_of_masks(gpu) if row["mask"] in BOOLS.values()] for gpu in ("h100", "h200")}
    long = [row for row in rows["h100"] if row["s"] >= 1024]
    table_rows = table("docs/benchmarks.md", "Bool masks")
    assert {label for label, *_ in table_rows} == {*BOOLS, "all"}
    for label, *cells in table_rows:
        label_rows = [row for row in long if row["mask"] == BOOLS.get(label, row["mask"])]
        for grad, cell in zip((False, True), cells, strict=True):
            sides = ratios_to_peer("stock", [row for row in label_rows if row["grad"] == grad])
            assert cell == (mean_and_range(sides) if sides else "-"), label
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    short = ratios_to_peer("stock", [row for row in rows["h100"] if row["s"] == 512])
    assert f"S 512: lowest {min(short):.2f}" in page
    for grad, words in (
        (False, "forward {:.2f} on average of {}, lowest {:.2f}"),
        (True, "16k, {:.2f} of {}, lowest {:.2f}"),
    ):
        sides = ratios_to_peer("flex", [row for row in long if row["grad"] == grad])
        assert words.format(geometric_mean(sides), len(sides), min(sides)) in page
    (row,) = (row for row in long if row["case"] == "random_fwd_d128_s4096")
    assert f"D 128 at 4k runs at {row['flop'] / row['ours_ms'] / 1e9:.0f} TFLOP/s" in page
    forward, grads = (
        ratios_to_peer("stock", [row for row in rows["h200"] if row["grad"] == grad]) for grad in (False, True)
    )
    assert f"H200 ({len(forward)} cells): {geometric_mean(forward):.2f}, lowest {min(forward):.2f}" in page
    assert f"{min(grads):.2f} to {max(grads):.3g}" in page


def test_additional_masks_equal_the_results():
    rows, page = rows_of("masks-h100"), " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    flash = ratios_to_peer("flex_flash", rows)
    assert f"{geometric_mean(flash):.2f} on average of {len(flash)}, lowest {min(flash):.2f}" in page
    for mask, label in (("random", "random"), ("bias_heads", "by head"), ("bias_keys", "padding")):
        sides = ratios_to_peer("stock", [row for row in rows if "_beside_" in row["case"] and row["mask"] == mask])
        assert f"{label} {geometric_mean(sides):.2f}, lowest {min(sides):.2f}" in page, mask


DECODE = {
    "static cache, 1 of 32 keys filled": "filled", "all of it filled": "all", "padding on the left, causal": "padding",
    "random by head": "random",
}  # fmt: skip


def test_table_of_masked_decode_equals_the_results():
    rows, table_rows = rows_of("maskdecode-h100"), table("docs/benchmarks.md", "Decode beside bool masks")
    assert {label for label, *_ in table_rows} == {*DECODE, "all"}
    for label, stock, unmasked_ratios in table_rows:
        label_rows = [row for row in rows if row["mask"] == DECODE.get(label, row["mask"])]
        assert stock == mean_and_range(ratios_to_peer("stock", label_rows)), label
        # B, Hq, Hkv, Sq, Sk, D, Dv
        long = {row["shape"][0]: row for row in label_rows if row["shape"][3:6] == [1, 32768, 128]}
        ratios = [row["unmasked_ms"] / row["ours_ms"] for _, row in sorted(long.items())]
        assert label == "all" or unmasked_ratios == ", ".join(
            f"{x:.3g}" if x >= 10 else f"{x:.{1 + (x < 2)}f}" for x in ratios
        )
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    long = [row for row in rows if row["shape"][4] == 32768]
    filled = ratios_to_peer("stock", [row for row in long if row["mask"] == "filled"])
    unmasked_ratios = sorted(row["unmasked_ms"] / row["ours_ms"] for row in long if row["mask"] == "all")
    assert f"{min(filled):.1f} to {max(filled):.0f} x" in page
    assert (
        f"lowest {unmasked_ratios[0]:.2f} (D 64, batch 8), else {unmasked_ratios[1]:.2f} to {unmasked_ratios[-1]:.2f}"
        in page
    )
    h200 = ratios_to_peer("stock", rows_of("maskdecode-h200"))
    assert f"H200: {geometric_mean(h200):.2f} over stock, lowest {min(h200):.2f}" in page


def test_table_of_dropout_equals_the_results():
    rows = rows_of("dropout-h100")
    table_rows = table("docs/benchmarks.md", "Dropout")
    assert len(table_rows) == 7
    for label, length, *cells in table_rows:
        for grad, cell in enumerate(cells):
            label_rows = [
                row for row in rows if row["grad"] == bool(grad) and dropout_label(row["case"]) == (label, length)
            ]
            assert cell == mean_and_range(ratios_to_peer("stock", label_rows)), (label, length)


def dropout_label(case: str) -> tuple[str, str]:
    kinds = {"padding": "padding", "bias": "float mask", "causal": "causal"}
    short = "_q" in case
    label = next((mask_label for word, mask_label in kinds.items() if word in case), "nothing")
    shapes = {"padding": ", (B, 1, S, S)", "float mask": ", (1, H, S, S)"}
    return (label if short else label + shapes.get(label, "")), "short" if short else "long"


def test_deterministic_backward_equals_the_results():
    """Compare the deterministic backward with the default backward, from sequence length 2k on.

    Stock in deterministic mode is compared where timed.
    """
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    rows = {gpu: [row for row in rows_of(f"backward-{gpu}") if row["s"] >= 2048] for gpu in ("h100", "h200")}

    def default_speed_text(d: int) -> str:
        ratios = [row["ours_ms"] / row["one_order_ms"]["ours_fa3"] for row in rows["h100"] if row["d"] == d]
        return f"{geometric_mean(ratios):.2f} (D {d})"

    def stock_speed_text(gpu: str) -> tuple[str, set[int]]:
        timed = [row for row in rows[gpu] if "stock" in row["one_order_ms"]]
        stock_ratios = [row["one_order_ms"]["stock"] / row["one_order_ms"]["ours_fa3"] for row in timed]
        return f"{min(stock_ratios):.1f} to {max(stock_ratios):.1f}", {row["d"] for row in timed}

    (h100, dims), (h200, h200_dims) = stock_speed_text("h100"), stock_speed_text("h200")
    assert (dims, h200_dims) == ({128, 256}, {64, 128, 256})
    assert (
        f"{default_speed_text(128)}, {default_speed_text(64)} and {default_speed_text(256)} of the speed without"
        in page
    )
    assert f"{h100} times the speed of stock's deterministic backward (D 128 and 256; H200, with D 64: {h200})" in page


def test_readme_table_and_worst_case_equal_the_results():
    files = {"forward": "forward", "backward": "backward", "forward and backward": "train", "decode": "decode"}
    table_rows = table("README.md", "How fast")
    assert {row[0] for row in table_rows} == set(files)
    for suite_label, *cells in table_rows:
        rows = rows_of(f"{files[suite_label]}-h100")
        sides = ratios_to_peer("stock", rows), ratios_to_best_peer(rows)
        assert cells == [f"{geometric_mean(side):.2f} ({min(side):.2f})" for side in sides], suite_label
    backward = [row for row in rows_of("backward-h100") if row["d"] == 128]
    worst = min(backward, key=lambda row: row["ratio"])
    assert (worst["mask"], worst["s"], worst["best_peer"]) == ("full", 16384, "fa4")
    text = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"the D 128 backward averages {geometric_mean(ratios_to_best_peer(backward)):.2f} x the best peer; "
        f"the worst case is {worst['ratio']:.2f} (FA4, full, 16k)" in text
    )


WINDOWS = {
    "equal lengths": ("ragged", "fwd_equal"), "Zipf lengths": ("ragged", "fwd_zipf"),
    "1024 x 16, 4096 x 4": ("ragged", "fwd_short"), "equal lengths, with gradients": ("ragged", "train_equal"),
    "Zipf lengths, with gradients": ("ragged", "train_zipf"),
    "1024 x 16, 4096 x 4, with gradients": ("ragged", "train_short"), "windows": ("window", "fwd"),
    "windows, with gradients": ("window", "train"), "softcap": ("softcap", "fwd"),
    "softcap, with gradients": ("softcap", "train"), "sinks": ("sinks", "fwd"),
    "sinks, with gradients": ("sinks", "train"),
}  # fmt: skip


def test_table_of_windows_and_lengths_equals_the_results():
    table_rows = table("docs/benchmarks.md", "Windows, lengths, pages")
    assert [label for label, *_ in table_rows[: len(WINDOWS)]] == list(WINDOWS)
    for label, *cells in table_rows[: len(WINDOWS)]:
        name, part = WINDOWS[label]
        rows = [row for row in rows_of(f"{name}-h100") if row["case"].startswith(part)]
        sides = [ratios_to_peer(peer, rows) for peer in ("varlen", "fa3", "flex")]
        without_feature = [(row["all_ms"].get("ours_without_feature"), row["ours_ms"]) for row in rows]
        sides.append([plain_ms / feature_ms for plain_ms, feature_ms in without_feature if plain_ms is not None])
        for side, cell in zip(sides, cells, strict=True):
            assert cell == (f"{geometric_mean(side):.2f} ({min(side):.2f})" if side else "-"), label


def test_tables_of_8_bits_equal_the_results():
    """Compare both tables, and the sentence about single kernels."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = {row["case"]: row["errors"] for row in rows_of("accuracy-h100")}
    columns = ("ours_16bit", "qk8", "8bit", "e4m3", "fa3_fp8", "fa3_fp8_tensor", "cache_int8", "cache_e4m3_head")
    named = {name: f"{name}_d128_s16384" for name in ("normal", "fa3", "llm", "qwen", "dit")}
    named |= {f"layer {i}": f"recorded_layer{i}" for i in range(4)}
    cells_by_label = {name: cells for name, *cells in table("docs/benchmarks.md", "Eight bits")}
    for name, case in named.items():
        assert cells_by_label[name] == [f"{100 * rows[case][column]:.1f}" for column in columns], name
    for row in rows_of("cache8-h100"):
        B, Hq, Hkv, _, Sk, D, _ = row["shape"]
        call, peers = f"{B} x {Hq} x {Hkv} x {Sk}, D {D}", row["peers_ms"]
        times = [f"{1000 * ms:.1f}" for ms in (row["ours_ms"], peers["ours_e4m3"], peers["ours_16bit"])]
        assert cells_by_label[call] == [
            str(row["kv_bytes"] >> 20),
            *times,
            f"{peers['ours_16bit'] / row['ours_ms']:.2f}",
        ]
    for recipe in ("e4m3", "8bit", "qk8"):
        alone = ratios_to_peer("fa3_fp8", [row for row in rows_of("eightbit-h100") if row["recipe"] == recipe])
        assert f'"{recipe}" {geometric_mean(alone):.2f} ({min(alone):.2f})' in " ".join(page.split()), recipe
    call_ratios = [row["all_ms"]["ours_16bit"] / row["all_ms"]["ours_call"] for row in rows_of("eightbit-h100")]
    assert f"our 16 bits: {min(call_ratios):.2f} to {max(call_ratios):.2f}." in page
