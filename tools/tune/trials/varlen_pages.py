"""Pages of torch's varlen_attn: numbers against fp64, then times beside stock, for rows of VARLEN_ROWS.

Run on a GPU, in the repository:

    python tools/tune/trials/varlen_pages.py                  # numbers and times, about 60 s
    python tools/tune/trials/varlen_pages.py --generate       # also generate_batch() of transformers, about 60 s more

The script ends with an error after a wrong number. Each line of times has the medians of stock and of the forced
kernels, and stock / kernels. A form of calls ("paged_decode", "paged_rows") may get a row of VARLEN_ROWS if its lowest
ratio reaches SERVE_RATIO (dispatch_table.py).

Predictions: stock refuses pages that are no multiple of 256 rows. Decode reaches 1.0 or more. Gathered pages lose where
the keys are many more than the rows (0.5 to 0.9), and win for whole prompts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import varlen

import torch_flashplug
from torch_flashplug import explain_varlen
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.dispatch_table import SERVE_RATIO

AUX = varlen.AuxRequest(lse=True)


class Call:
    """A call of varlen_attn with random rows and permuted pages; all unused memory is NaN."""

    def __init__(  # noqa: PLR0913
        self, rows: Sequence[int], used: Sequence[int], page: int, D: int = 128, heads: tuple[int, int] = (32, 8),
        seed: int = 0,
    ) -> None:  # fmt: skip
        draw = torch.Generator("cuda").manual_seed(seed)
        counts = [-(-n // page) for n in used]
        pages = sum(counts) + 3
        order = torch.randperm(pages, device="cuda", generator=draw)
        self.pools = [
            torch.full((pages, page, heads[1], D), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        ]
        self.table = torch.full((len(used), max(1, *counts) + 1), 2**31 - 1, device="cuda", dtype=torch.int32)
        self.keys, at = [], 0
        for i, (n, count) in enumerate(zip(used, counts, strict=True)):
            pages_of_sequence = order[at : at + count]
            at += count
            self.table[i, :count] = pages_of_sequence.int()
            padded = torch.full((2, count * page, heads[1], D), math.nan, device="cuda", dtype=torch.bfloat16)
            padded[:, :n] = torch.randn(2, n, heads[1], D, device="cuda", generator=draw)
            for pool, x in zip(self.pools, padded, strict=True):
                pool[pages_of_sequence] = x.view(count, page, heads[1], D)
            self.keys.append(padded[:, :n])
        self.q = torch.randn(sum(rows), heads[0], D, device="cuda", generator=draw).bfloat16()
        self.cu = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
        self.used = torch.tensor(used, device="cuda", dtype=torch.int32)
        self.rows, self.max_q, self.max_k = list(rows), max(rows), max(used)

    def args(self) -> tuple:
        return self.q, *self.pools, self.cu, None, self.max_q, self.max_k

    def run(self, out: Tensor | None = None, **settings: object) -> tuple[Tensor, Tensor]:
        settings = {"enable_gqa": True, "seqused_k": self.used, "block_table": self.table, **settings}
        function, first = (varlen.varlen_attn, ()) if out is None else (varlen.varlen_attn_out, (out,))
        with torch.no_grad():
            return function(*first, *self.args(), **settings, return_aux=AUX)

    def expected(self, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Compute output and LSE in fp64."""
        out = torch.zeros(self.q.shape, device="cuda", dtype=torch.float64)
        lse = torch.full((self.q.shape[1], len(self.q)), math.inf, device="cuda", dtype=torch.float64)
        first = 0
        for n, pair in zip(self.rows, self.keys, strict=True):
            q = self.q[first : first + n].double().transpose(0, 1)
            k, v = (x.double().transpose(0, 1).repeat_interleave(len(q) // x.shape[1], 0) for x in pair)
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
            diagonal = torch.arange(n, device="cuda").unsqueeze(1) + k.shape[1] - n
            key, (left, right) = torch.arange(k.shape[1], device="cuda"), window
            hidden = (key > diagonal + right) * (right >= 0) | (key < diagonal - left) * (left >= 0)
            sums = scores.masked_fill_(hidden, -math.inf).logsumexp(-1)
            out[first : first + n] = (torch.exp(scores - sums.unsqueeze(-1)).nan_to_num(0.0) @ v).transpose(0, 1)
            lse[:, first : first + n] = torch.where(sums == -math.inf, math.inf, sums)
            first += n
        return out, lse


def check(name: str, call: Call, window: tuple[int, int]) -> None:
    bindings.counters(reset=True)
    wide = torch.full((*call.q.shape[:2], call.q.shape[2] + 8), math.nan, device="cuda", dtype=call.q.dtype)
    with torch_flashplug.sdpa_backend("fa3"):
        out, lse = call.run(window_size=window)
        strided, _ = call.run(wide[..., : call.q.shape[2]], window_size=window)
        one_split = call.run(window_size=window, num_splits=1)[0]
    assert bindings.counters(reset=True)["ours_fwd"] == 3, name
    exact_out, exact_lse = call.expected(window)
    errors = [float((x.double() - exact_out).abs().max()) for x in (out, one_split)]
    at = exact_lse.isfinite()
    lse_error = float((lse.double() - exact_lse)[at].abs().max()) if bool(at.any()) else 0.0
    scale = float(exact_out.abs().max())
    print(f"numbers {name:<44} out {max(errors):.2e} of {scale:.2f}, lse {lse_error:.1e}", flush=True)
    assert max(errors) <= 0.01 * max(scale, 1.0) and lse_error < 1e-3 and torch.equal(strided, out), name
    assert torch.equal(lse.isinf(), exact_lse.isinf()), name


def check_numbers(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def lengths(count: int, low: int, high: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    for D in (64, 128, 256):
        for page in (16, 64, 256):
            for window in ((-1, -1), (-1, 0), (100, 0)):
                decode = Call([1, 1, 0, 1, 1, 1, 1], lengths(6, 0, 900) + [0], page, D, seed=seed)
                packed = Call([1, 70, 0, 300, 5], [*lengths(4, 1, 900), 600], page, D, seed=seed)
                check(f"decode D {D} page {page} window {window}", decode, window)
                check(f"packed D {D} page {page} window {window}", packed, window)
    call = Call([5, 130, 1], [300, 400, 77], 16)
    with torch_flashplug.sdpa_backend("fa3"):
        batch = call.run(num_splits=1, window_size=(-1, 0))[0]
        alone = Call.__new__(Call)
        alone.__dict__ |= call.__dict__ | {"q": call.q[135:], "table": call.table[2:], "used": call.used[2:]}
        alone.cu, alone.max_q = torch.tensor([0, 1], device="cuda", dtype=torch.int32), 1
        assert torch.equal(alone.run(num_splits=1, window_size=(-1, 0))[0], batch[135:]), "num_splits=1"
    print("numbers num_splits=1: the same bits alone and in a batch", flush=True)


def graph_of(function: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph


def medians(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int = 15) -> dict[str, float]:
    """Return the median us of a call for each graph, from interleaved replays."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(), graph.replay(), end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / calls)
    return {name: statistics.median(x) for name, x in times.items()}


def time_calls() -> None:
    uneven = [300 + (9000 - 300) * i // 16 for i in range(17)]
    cases = {
        "paged_decode": {
            "64 x 2000": ([1] * 64, [2000] * 64),
            "17 x 300..9000": ([1] * 17, uneven),
            "4 x 16000": ([1] * 4, [16000] * 4),
            "1 x 32000": ([1], [32000]),
        },
        "paged_rows": {
            "4 x 2048 of 2048 (prompts)": ([2048] * 4, [2048] * 4),
            "4 x 512 of 4096 (chunks)": ([512] * 4, [4096] * 4),
            "1 x 2048 + 31 x 1 (mixed)": ([2048] + [1] * 31, [2048, *[300 + 280 * i for i in range(31)]]),
            "32 x 4 of 4000 (speculation)": ([4] * 32, [4000] * 32),
        },
    }
    for form, calls in cases.items():
        ratios = []
        for name, (rows, used) in calls.items():
            for page in (16, 256):
                call = Call(rows, used, page)
                plan = explain_varlen(*call.args(), seqused_k=call.used, block_table=call.table, enable_gqa=True)
                assert plan.backend == "stock", f"{name}: auto must leave unmeasured pages to stock"
                graphs, repeats = {}, 10
                for variant, backend in (("stock", "stock"), ("kernels", "fa3")):
                    try:
                        with torch_flashplug.sdpa_backend(backend):
                            graphs[variant] = graph_of(lambda call=call: call.run(window_size=(-1, 0)), repeats)
                    except RuntimeError as error:
                        print(f"times {form} {name}, pages of {page}: {variant}: {str(error).splitlines()[0][:90]}")
                us = medians(graphs, repeats)
                text = ", ".join(f"{variant} {time:.1f} us" for variant, time in us.items())
                if len(us) == 2:
                    ratios.append(us["stock"] / us["kernels"])
                    text += f", ratio {ratios[-1]:.2f}"
                print(f"times {form} {name}, pages of {page}: {text}", flush=True)
        if ratios:
            verdict = "may get a row" if min(ratios) >= SERVE_RATIO else "must stay with stock"
            print(f"times {form}: lowest ratio {min(ratios):.2f}: the form {verdict} of VARLEN_ROWS", flush=True)


def time_generation() -> None:
    """Time generate_batch() with block tables, and with pages gathered by transformers."""
    import transformers

    from torch_flashplug.integrations import transformers as integration

    integration.install()
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "vocab_size": 32000}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=32, num_key_value_heads=8, attn_implementation=integration.FLASH
    )
    model = transformers.LlamaForCausalLM(config).cuda().bfloat16().eval()
    settings = transformers.GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 31000, (n,), generator=draw).tolist() for n in range(200, 1200, 32)]
    initialization, name, _ = integration._WRAPPED[0]
    wrapped = getattr(initialization, name)
    tokens = {}
    for round_ in range(2):
        for variant, question in (("block tables", wrapped), ("gathered", wrapped.flashplug_wraps)):
            setattr(initialization, name, question)
            start = time.perf_counter()
            results = model.generate_batch(inputs=prompts, generation_config=settings)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            tokens[variant] = [x.generated_tokens for x in results.values()]
            rate = sum(map(len, tokens[variant])) / seconds
            print(f"generate_batch round {round_} {variant}: {rate:.0f} tokens/s", flush=True)
    equal = sum(a == b for a, b in zip(*tokens.values(), strict=True))
    print(f"generate_batch: {equal} of {len(prompts)} prompts have equal tokens (bf16 may round differently)")
    setattr(initialization, name, wrapped)
    integration.uninstall()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generate", action="store_true", help="also time generate_batch() of transformers")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {args.seed}", flush=True)
    check_numbers(args.seed)
    time_calls()
    if args.generate:
        time_generation()


if __name__ == "__main__":
    main()
