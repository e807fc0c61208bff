"""Benchmark of this project's kernels against every importable peer.

A peer is a baseline of a different library, or stock PyTorch. All candidates run in a single process, in interleaved
rounds. The results are a JSON file, a table and a picture.

    --suite forward          ours and peers over head dim, mask and length; results are checked before timing
    --suite headdims         like forward, for head dims outside the grid
    --suite latency          short and small calls, replayed from a CUDA graph
    --suite backward         gradients of one forward call, ours and peers over head dim, mask and length
    --suite train            like backward, with the forward call
    --suite decode           decode: few query rows against many keys, with K and V in memory, then in L2
    --suite fa2              kernels for every GPU since sm_80, forced, against torch's FlashAttention-2; also gradients
    --suite masks            bool masks by pattern, head dim and length, passed as users do; forward, then training
    --suite dropout          dropout of 0.1 by head dim, mask and length; forward, then training
    --suite eightbit         8-bit attention by recipe, kernels alone and complete calls, against 16 bits and FA3's FP8
    --suite accuracy         errors of 8-bit attention against fp64 by recipe and input, with FA3's FP8 and 8-bit caches
    --suite maskdecode       decode with KV caches that are partly masked by a bool mask
    --suite cache8           one query row against 8-bit KV caches, compared with the project's 16-bit decode
    --suite varlen           packed sequences; forward, then training; against torch's varlen and the FlashAttention
                             wheels
    --suite window           sliding windows by size and length; forward, then training
    --suite softcap          capped scores; forward, then training
    --suite sinks            sinks with and without a window; forward, then training
    --suite paged            one query row against a paged KV cache, compared with FA3, FlashInfer and decode of
                             contiguous caches
    --suite pagedprefill     packed queries over a paged KV cache, compared with FA3, contiguous keys and gathered pages
    --suite blocks           FlexAttention's block masks by pattern and length; forward, then training
    --suite multi            all GPUs of the host: context_parallel by length and rotation, Ulysses, blocks of DTensors
    --suite host             host time per call, and everyday calls in auto mode against stock
    --suite choice | grad    ours (forced) against the default of stock, forward | forward + backward: the source of the
                             ChoiceRows in torch_flashplug/registry/dispatch_table.py
    --suite grouped          forward + backward of grouped heads with few keys, ours (forced) against the default of
                             stock, replayed from a CUDA graph: with few KV blocks, SMs are idle
    --suite groups           forward + backward of grouped heads at the sizes of large models, ours (forced) against
                             every peer, and against ours with as many KV heads as query heads
    --suite everyday         calls of published models in auto mode, against the default of stock and every peer
    --suite largedims        head dims above 256, ours (forced) against stock and FFPA; forward, then training, then
                             decode
    --suite models           a stack of decoder layers of real size, with the plugin off and on (auto): time and energy
    --suite odd              like choice and grad, for calls that the Hopper kernels cannot read, on the kernels for
                             every GPU (fa2, forced); forward, then forward + backward

A benchmark is not a test: an error ends the run only if a result is wrong or an option is invalid.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools.bench import baselines, ranks, report, result_schema
from tools.bench.runner import Bench
from tools.bench.suites import (
    decode,
    dense,
    dropout,
    everyday,
    large_head_dims,
    masks,
    model_stack,
    multi_gpu,
    paged,
    paged_prefill,
    quantized,
    varlen_window,
)

SUITES = {
    "forward": dense.suite_forward,
    "headdims": dense.suite_headdims,
    "latency": dense.suite_latency,
    "backward": dense.suite_backward,
    "train": dense.suite_train,
    "decode": decode.suite_decode,
    "fa2": dense.suite_fa2,
    "masks": masks.suite_masks,
    "dropout": dropout.suite_dropout,
    "eightbit": quantized.suite_eightbit,
    "accuracy": quantized.suite_accuracy,
    "maskdecode": decode.suite_maskdecode,
    "cache8": quantized.suite_cache8,
    "varlen": varlen_window.suite_varlen,
    "window": varlen_window.suite_window,
    "softcap": varlen_window.suite_softcap,
    "sinks": varlen_window.suite_sinks,
    "paged": paged.suite_paged,
    "pagedprefill": paged_prefill.suite_pagedprefill,
    "blocks": masks.suite_blocks,
    "multi": multi_gpu.suite_multi,
    "host": dense.suite_host,
    "choice": dense.suite_choice,
    "grad": dense.suite_grad,
    "grouped": dense.suite_grouped,
    "groups": dense.suite_groups,
    "everyday": everyday.suite_everyday,
    "largedims": large_head_dims.suite_largedims,
    "models": model_stack.suite_models,
    "odd": dense.suite_odd,
}

OLD_NAMES = {"ragged": "varlen"}  # names in stored results that are still accepted

# Providers of each suite, unless --providers is passed. A suite without an entry uses all providers except ours_fa2.
SUITE_PROVIDERS = {
    "fa2": {"ours_fa2", "fa2"},
    "grouped": {"ours_fa3", "stock"},
    "groups": {"ours_fa3", "stock", "cudnn", "fa2", "fa3", "fa4"},
    "everyday": {"ours_auto", "stock", "cudnn", "fa2", "fa3", "fa4"},
    "largedims": large_head_dims.PROVIDERS,
    "models": set(model_stack.PROVIDERS),
    "odd": {"ours_fa2", "stock"},
    "masks": {"ours_fa3", "ours_auto", "ours_tall", "stock", "efficient", "flex", "flex_flash"},
    "dropout": {"ours_fa3", "stock", "cudnn", "fa2", "efficient"},
    "maskdecode": set(decode.MASKED_PROVIDERS),
    "eightbit": {"ours_fa3", "fa3"},
    "accuracy": {"ours_fa3", "fa3"},
    "cache8": {"ours_fa2", "ours_fa3"},
    "paged": {"ours_fa2", "ours_fa3", "fa3"},
    "pagedprefill": paged_prefill.PROVIDERS,
    "blocks": {"ours_fa3", "stock", "flex"},
    "multi": {"ours_auto", "stock"},
    **{suite: varlen_window.PROVIDERS for suite in ("varlen", "window", "softcap", "sinks")},
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=(*SUITES, *OLD_NAMES), required=True)
    parser.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds per case; at least 7 for results that are kept"
    )
    parser.add_argument("--filter", default="", help="comma-separated texts: run only cases with a text in the name")
    parser.add_argument("--providers", default="", help="comma-separated providers (default: all that can be imported)")
    parser.add_argument(
        "--out", type=Path, default=report.ROOT / "tools" / "results", help="folder of the JSON file and the PNG"
    )
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="start no case after this time")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with fp64 before timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="commit name in the results (default: git describe)")
    options = parser.parse_args()
    options.suite = OLD_NAMES.get(options.suite, options.suite)
    return options


def main() -> None:
    options = _options()
    if options.rounds < 7:
        print(f"--rounds {options.rounds}: fewer than 7 rounds say little. Use at least 7 for results that are kept.")
    if options.suite == "multi":
        ranks.start(options.device)
    clocks = report.read_clocks()
    names = set(options.providers.split(",")) if options.providers else SUITE_PROVIDERS.get(options.suite)
    available, absent = baselines.providers(names)
    deadline = time.monotonic() + options.budget_seconds
    bench = Bench(options.device, options.rounds, deadline, options.filter, not options.no_check, available, absent)
    # sdpa_kernel warns once per reason if a peer has no kernel. The rows already note such peers as "refused".
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        SUITES[options.suite](bench)
    num_ranks = ranks.end() if options.suite == "multi" else 1
    document = report.header(options.suite, clocks, options.commit or report.commit())
    document["gpu"] += f" x{num_ranks}" * (num_ranks > 1)
    document["clocks"]["under_load"] = bench.clocks
    document |= {"rounds": options.rounds, "absent": absent, "skipped": bench.skipped, "rows": bench.rows}
    if not bench.rows:
        raise SystemExit(
            f"suite {options.suite} measured no case: either no case name contains {options.filter!r}, or "
            f"--budget-seconds {options.budget_seconds} is too short"
        )
    console = Console(width=180)
    complete = result_schema.with_derived_columns(document)
    report.print_table(complete, console)
    if options.suite in {"choice", "grad"}:
        report.print_classes(document, console)
    written = report.write_json(document, options.out)
    print("wrote", written)
    if picture := report.plot(complete, baselines.labels(), written.with_suffix(".png")):
        print("wrote", picture)


if __name__ == "__main__":
    main()
