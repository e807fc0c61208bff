"""The command line, `python -m torch_flashplug`: the verbs demo, explain, warmup, info and check.

`__main__` only declares the options. The implementation of each verb is in the module named after the subject.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import sys
from pathlib import Path

from . import env
from .registry.dtypes import SDPA_DTYPES
from .version import __version__


def _sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a text such as "1,32,128"; an empty tuple if the text has a different form."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        return ()
    return sizes if min(sizes) >= 0 else ()


def _shape(text: str) -> tuple[int, ...]:
    sizes = _sizes(text)
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(
            f"must be 4 sizes batch,heads,length,head_dim, such as 1,32,1,128, but got {text!r}"
        )
    return sizes


def _count(text: str) -> int:
    sizes = _sizes(text)
    if len(sizes) != 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, or 0 for the default, but got {text!r}")
    return sizes[0]


def _mask_shape(text: str) -> tuple[int, ...]:
    sizes = _sizes(text)
    if not 2 <= len(sizes) <= 4:
        rule = "2 to 4 sizes that broadcast to batch,heads,queries,keys, such as 1,1,128,8192"
        raise argparse.ArgumentTypeError(f"must be {rule}, but got {text!r}")
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_flashplug",
        description="Attention kernels for Hopper GPUs behind F.scaled_dot_product_attention.",
    )
    parser.add_argument("--version", action="version", version=f"torch_flashplug {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    demo = verbs.add_parser("demo", help="run a byte-level GPT on a text file, and compare with stock PyTorch")
    demo.add_argument("file", nargs="?", help="a text file (default: README.md, or the package's own source)")
    demo.add_argument(
        "--rounds",
        type=_count,
        default=0,
        help="interleaved timing rounds on a GPU (default: 11); CPU runs are not timed",
    )
    instead = demo.add_mutually_exclusive_group()
    instead.add_argument(
        "--long", action="store_true", help="instead: one prefill of 131072 bytes, and the memory used"
    )
    instead.add_argument(
        "--train", action="store_true", help="instead: train on the file; print losses, speed and memory"
    )
    instead.add_argument(
        "--serve", action="store_true", help="instead: serve prompts of many lengths from a paged KV cache"
    )
    instead.add_argument("--precision", help="instead: compare a trained model in 8bit, qk8 or e4m3 with 16 bits")
    instead.add_argument(
        "--gpus", type=_count, default=0, help="instead: train a Llama on this number of GPUs, in two ways"
    )
    demo.add_argument(
        "--repeats", type=_count, default=0, help="--train: training runs of each attention (default: 5, on a CPU 2)"
    )
    demo.add_argument("--picture", default="train_losses.png", help="--train, --gpus: file for the loss curves (PNG)")
    explain = verbs.add_parser("explain", help="print which backend serves a call, and why; needs no GPU")
    explain.add_argument("--q", type=_shape, required=True, help="batch,heads,length,head_dim of the query")
    explain.add_argument("--k", type=_shape, required=True, help="batch,heads,length,head_dim of the key")
    explain.add_argument("--v", type=_shape, help="batch,heads,length,head_dim of the value (default: same as the key)")
    _add_options_of_calls(explain)
    explain.add_argument("--backend", default="auto", help="as in sdpa_backend(...): auto, fa3, fa2, math or stock")
    explain.add_argument("--json", action="store_true")
    _add_options_of_warmup(
        verbs.add_parser("warmup", help="compile the kernels of a model before the first call; needs no GPU")
    )
    info = verbs.add_parser("info", help="print versions, devices, hook, kernel packs, cache and environment flags")
    info.add_argument("--json", action="store_true")
    verbs.add_parser(
        "check", help="test this installation: PASS or FAIL lines with remedies, and a text for a bug report"
    )
    return parser


def _add_options_of_warmup(parser: argparse.ArgumentParser) -> None:
    for_many = {"action": "append", "default": []}
    parser.add_argument(
        "--model-config",
        **for_many,
        type=Path,
        metavar="FILE",
        help="config.json of a model, or the model's folder; nothing is downloaded (repeatable)",
    )
    parser.add_argument(
        "--shapes",
        **for_many,
        type=_shape,
        nargs="+",
        metavar="SHAPE",
        help="shapes of query, key and optionally value of a call, as in --q, --k and --v of explain (repeatable)",
    )
    parser.add_argument(
        "--from-log",
        **for_many,
        type=Path,
        metavar="FILE",
        help='a log that names kernels, written with TORCH_LOGS="+torch_flashplug" (repeatable)',
    )
    _add_options_of_calls(parser)
    parser.add_argument("--deterministic", action="store_true", help="compile the kernels of deterministic gradients")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"write to this folder instead of the user's cache; on the target machine, set {env.CACHE_DIR.name} to it",
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        default=0,
        help="number of kernels compiled in parallel (default: number of CPUs, at most 8)",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the kernels, and compile nothing")
    parser.add_argument("--prune", action="store_true", help="delete kernels of other versions from the cache")


def _add_options_of_calls(parser: argparse.ArgumentParser) -> None:
    """Add the options for describing F.scaled_dot_product_attention calls and the GPU."""
    parser.add_argument(
        "--device", default="", help="h100, h200, a100, l4 or rtx4090 (default: this machine's GPU, else h100)"
    )
    parser.add_argument(
        "--dtype", choices=SDPA_DTYPES, help="dtype of the tensors (default: bf16, or the dtype in --model-config)"
    )
    parser.add_argument("--causal", action="store_true", help="is_causal=True")
    parser.add_argument("--mask", type=_mask_shape, help="shape of attn_mask, such as 1,1,128,8192")
    parser.add_argument("--mask-dtype", choices=("bool", *SDPA_DTYPES), default="bool")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout_p")
    parser.add_argument("--grad", action="store_true", help="the call needs gradients")


def _explain(options: argparse.Namespace) -> None:
    from .cli import explain

    shapes = explain.Shapes(options.q, options.k, options.v or options.k, options.mask)
    plan = explain.plan(shapes, **_facts_of_calls(options), backend=options.backend)
    print(json.dumps(dataclasses.asdict(plan), indent=1) if options.json else plan)


def _facts_of_calls(options: argparse.Namespace) -> dict[str, object]:
    names = ("mask_dtype", "dropout", "causal", "grad", "device")
    return {name: getattr(options, name) for name in names} | {"dtype": options.dtype or "bf16"}


def _warmup(options: argparse.Namespace) -> None:
    from .cli import model_config, warmup

    if options.out is not None:
        warmup.use_folder(options.out)
    if options.prune:
        print(f"{warmup.prune()} kernels of other versions deleted")
    facts = warmup.facts_of(options.device)
    skipped: list[bool] = []

    def on_skip(skip: model_config.Skip) -> None:
        print(f"warmup: {skip.message}", file=sys.stderr, flush=True)
        skipped.append(skip.is_fault)

    names = warmup.kernels_of_models(
        options.model_config,
        facts,
        dtype=options.dtype or "",
        training=options.grad,
        deterministic=options.deterministic,
        on_skip=on_skip,
    )
    names += warmup.kernels_of_shapes(options.shapes, options.mask, **_facts_of_calls(options))
    names += warmup.kernels_of_logs(options.from_log)
    names = list(dict.fromkeys(names))
    if not (options.model_config or options.shapes or options.from_log):
        sys.exit(
            None if options.prune else "warmup: at least one of --model-config, --shapes and --from-log must be given."
        )
    if not names:
        sys.exit(f"warmup: no torch_flashplug kernel serves these calls. {warmup.no_kernel_reason(facts)}")
    if options.list:
        print(*names, sep="\n")
        sys.exit(any(skipped))
    outcome = warmup.compile_all(names, facts["cc"], options.jobs, packs=options.out is None)
    print(warmup.report(outcome))
    sys.exit(bool(outcome.failed) or any(skipped))


def _info(options: argparse.Namespace) -> None:
    from .cli import env_info

    facts = env_info.collect()
    print(json.dumps(facts, indent=1)) if options.json else env_info.show(facts)


def _check(options: argparse.Namespace) -> None:
    from .cli import check

    sys.exit(check.run())


def _demo(options: argparse.Namespace) -> None:
    try:
        from .demo import inference, long_context, multi_gpu, precision, serve, train
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "rich":
            raise
        sys.exit("demo: the package rich, which prints the tables, must be installed. Run `pip install rich`.")
    if options.long:
        long_context.run(options.file)
    elif options.serve:
        serve.run(options.file)
    elif options.precision:
        precision.run(options.precision, options.file)
    elif options.gpus:
        multi_gpu.launch(options.file, options.gpus, options.picture)
    elif options.train:
        train.run(options.file, rounds=options.rounds, repeats=options.repeats, picture=options.picture)
    else:
        inference.run(options.file, rounds=options.rounds)


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    verbs = {"demo": _demo, "explain": _explain, "warmup": _warmup, "info": _info, "check": _check}
    try:
        try:
            verbs[options.verb](options)
        finally:
            sys.stdout.flush()  # so that a write error is raised here, and not at the end of the process
    except ValueError as error:
        sys.exit(f"{options.verb}: {error}")
    except KeyboardInterrupt:
        print(f"\n{options.verb}: interrupted", file=sys.stderr)
        sys.exit(130)  # the exit status that shells report: 128 + SIGINT
    except OSError as error:
        if error.errno not in {errno.EPIPE, errno.ENOSPC}:
            raise
        # Python flushes standard output once more at the end of the process. The second flush would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141 if error.errno == errno.EPIPE else f"{options.verb}: {error.strerror}")  # 128 + SIGPIPE


if __name__ == "__main__":
    main()
