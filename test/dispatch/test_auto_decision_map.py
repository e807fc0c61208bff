"""Map of the decisions of auto: classes of head dims, masks and lengths -> the serving kernels, on an H100. No GPU.

A hole in the rows of dispatch_table.py, or between rows, shows as a dot among digits.

A change of rows shows as a diff here. After reading the diff, run:

    EXPECTTEST_ACCEPT=1 pytest test/dispatch/test_auto_decision_map.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

import expecttest
from golden_plans import Call, call

from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.architectures import FAMILIES

LENGTHS = (16, 64, 256, 512, 1024, 2048, 4096, 16384)
SIZES = ((1, 8), (1, 32), (16, 32))  # batch and heads: a letter of a cell each
CallMaker = Callable[[int, int, tuple[int, int]], Call]  # maps D, a length and an entry of SIZES to a call
LETTERS = {"fa3": "3", "fa2": "2", "stock": "."}


def backend_letter(problem: Call) -> str:
    return LETTERS[bindings.plan(problem, DEVICES["h100"])["backend"]]


def map_block(title: str, dims: Iterable[int], make_call: CallMaker) -> str:
    """Return a line for each run of head dims with equal decisions, with a column for each length."""
    lines = {
        d: [" ".join("".join(backend_letter(make_call(d, s, size)) for size in SIZES) for s in LENGTHS)] for d in dims
    }
    text = f"{title}\n"
    for (line,), run in groupby(lines, key=lines.get):
        first_dim, *further_dims = run
        text += f"{f'{first_dim}..{further_dims[-1]}' if further_dims else first_dim:>9} {line}\n"
    return text


def square_call(**facts: int) -> CallMaker:
    return lambda d, s, size: {**call((*size, size[1]), (s, s), (d, d)), **facts}


def decode_call(group: int) -> CallMaker:
    return lambda d, s, size: call((*size, size[1] // group), (1, s), (d, d))


class TestMap(expecttest.TestCase):
    maxDiff = None

    def setUp(self) -> None:
        startup.push_tables()

    def test_auto_decision_for_each_class_of_calls(self) -> None:
        eights, odd = range(8, 257, 8), [d for d in range(2, 257, 10) if d % 8]
        text = f"{'D':>9} {' '.join(f'{s:>3}' if s < 1024 else f'{s // 1024:>2}k' for s in LENGTHS)}\n"
        for mask, causal in (("full", 0), ("causal", 1)):
            for directions, grad in (("forward", 0), ("forward and backward", 1)):
                title, plain = f"{directions}, {mask}", {"causal": causal, "grad": grad}
                text += map_block(title, eights, square_call(**plain))
                text += map_block(f"{title}, Dv 128", (64, 192), square_call(Dv=128, **plain))
                text += map_block(f"{title}, D no multiple of 8", odd, square_call(**plain))
                text += map_block(f"{title}, misaligned", eights, square_call(align_k=2, **plain))
                text += map_block(f"{title}, last dim not contiguous", eights, square_call(last_stride_v=2, **plain))
        text += map_block("one row of 4 query heads a KV head", eights, decode_call(4))
        self.assertExpectedInline(
            text,
            """\
        D  16  64 256 512  1k  2k  4k 16k
forward, full
    8..32 222 333 33. 333 333 333 333 333
   40..64 333 333 33. 333 333 333 333 333
  72..256 333 333 333 333 333 333 333 333
forward, full, Dv 128
  64..192 333 333 333 333 333 333 333 333
forward, full, D no multiple of 8
    2..62 222 222 222 2.. 2.. ... ... ...
  82..252 222 222 22. ... ... ... ... ...
forward, full, misaligned
    8..64 222 222 22. ... ... ... ... ...
  72..128 22. 22. ... ... ... ... ... ...
 136..256 ... ... ... ... ... ... ... ...
forward, full, last dim not contiguous
   8..256 222 222 222 222 222 222 222 222
forward and backward, full
   8..256 ... 333 333 333 333 333 333 333
forward and backward, full, Dv 128
       64 ... 333 ... ... ... 333 333 333
      192 ... 333 333 333 333 333 333 333
forward and backward, full, D no multiple of 8
   2..122 222 222 222 22. 22. ... ... ...
 132..252 222 222 22. 2.. 2.. ... ... ...
forward and backward, full, misaligned
   8..128 222 222 22. 2.. 2.. ... ... ...
 136..256 ... 222 ... ... ... ... ... ...
forward and backward, full, last dim not contiguous
   8..128 222 222 222 222 222 222 222 222
 136..256 222 222 222 222 222 222 222 22.
forward, causal
    8..64 333 333 33. 33. 333 333 333 333
  72..192 333 333 333 333 333 333 333 333
 200..256 333 333 333 33. 333 333 333 333
forward, causal, Dv 128
  64..192 333 333 333 333 333 333 333 333
forward, causal, D no multiple of 8
    2..62 222 222 222 22. 22. ... ... ...
  82..122 222 222 222 ... ... ... ... ...
 132..252 222 222 22. ... ... ... ... ...
forward, causal, misaligned
    8..64 222 222 22. ... ... ... ... ...
  72..128 22. 22. ... ... ... ... ... ...
 136..256 ... ... ... ... ... ... ... ...
forward, causal, last dim not contiguous
   8..256 222 222 222 222 222 222 222 222
forward and backward, causal
   8..256 333 333 333 333 333 333 333 333
forward and backward, causal, Dv 128
       64 333 333 333 333 333 333 333 333
      192 333 333 333 333 333 333 ... ...
forward and backward, causal, D no multiple of 8
   2..122 222 222 222 22. 22. ... ... ...
 132..252 222 222 22. 2.. 2.. ... ... ...
forward and backward, causal, misaligned
    8..64 222 222 222 2.. 2.. ... ... ...
  72..128 222 222 22. ... ... ... ... ...
 136..256 ... ... ... ... ... ... ... ...
forward and backward, causal, last dim not contiguous
   8..128 222 222 222 222 222 222 222 222
 136..256 222 222 222 222 222 222 222 22.
one row of 4 query heads a KV head
    8..32 222 222 222 222 222 222 222 222
   40..56 333 333 333 333 333 222 222 222
  64..112 333 333 333 333 333 333 333 333
      120 333 333 333 333 333 222 222 222
 128..192 333 333 333 333 333 333 333 333
 200..248 333 333 333 333 333 222 222 222
      256 333 333 333 333 333 333 333 333
""",
        )

    def test_kernel_for_each_head_dim(self) -> None:
        """All multiples of 8 are covered.

        A row taking over head dims of a different row must serve by ratios measured for these head dims.
        """
        text = ""
        for lengths in ((4096, 4096), (512, 512), (1, 4096)):
            plans = {d: bindings.plan(call((16, 32, 32), lengths, (d, d)), DEVICES["h100"]) for d in range(8, 257, 8)}
            text += f"{lengths[0]} x {lengths[1]}\n"
            for kernel, run in groupby(plans, key=lambda d: plans[d]["kernel"] or plans[d]["backend"]):  # noqa: B023
                first_dim, *further_dims = run
                text += f"{f'{first_dim}..{further_dims[-1]}' if further_dims else first_dim:>9} {kernel}\n"
        self.assertExpectedInline(
            text,
            """\
4096 x 4096
    8..64 fwd_sm90_bf16_d64_full_m192n128s2
       72 fwd_sm90_bf16_d96_full_m192n112s2
       80 fwd_sm90_bf16_d80_full_m192n112s2
   88..96 fwd_sm90_bf16_d96_full_m192n112s2
 104..128 fwd_sm90_bf16_d128_full_m128n160s2
      136 fwd_sm90_bf16_d192_full_m128n112s2
      144 fwd_sm90_bf16_d160_full_m128n128s2
      152 fwd_sm90_bf16_d192_full_m128n112s2
      160 fwd_sm90_bf16_d160_full_m128n128s2
 168..192 fwd_sm90_bf16_d192_full_m128n112s2
 200..256 fwd_sm90_bf16_d256_full_m128n80s2
512 x 512
    8..64 fwd_sm90_bf16_d64_full_m192n128s2
       72 fwd_sm90_bf16_d96_full_m192n112s2
       80 fwd_sm90_bf16_d80_full_m192n112s2
       88 fwd_sm90_bf16_d96_full_m192n112s2
       96 fwd_sm90_bf16_d96_full_m128n128s2
 104..128 fwd_sm90_bf16_d128_full_m128n128s2
      136 fwd_sm90_bf16_d192_full_m128n112s2
      144 fwd_sm90_bf16_d160_full_m128n128s2
      152 fwd_sm90_bf16_d192_full_m128n112s2
      160 fwd_sm90_bf16_d160_full_m128n128s2
 168..192 fwd_sm90_bf16_d192_full_m128n112s2
 200..256 fwd_sm90_bf16_d256_full_m128n64s2
1 x 4096
    8..56 decode_sm80_bf16_d64_full_m16n64s3
       64 decode_sm90_bf16_d64_full_m64n64s4
  72..112 decode_sm90_bf16_d128_full_m64n64s3
      120 decode_sm80_bf16_d128_full_m16n128s1
      128 decode_sm90_bf16_d128_full_m64n64s3
 136..192 decode_sm90_bf16_d192_full_m64n64s4
 200..248 decode_sm80_bf16_d256_full_m16n64s1
      256 decode_sm90_bf16_d256_full_m64n64s3
""",
        )

    def test_single_query_rows_of_all_head_dims_run_on_plugin_kernels(self) -> None:
        """Stock makes a plan for each new length of a cache, which costs 36 ms and more per token."""
        dims = range(8, 257, 8)
        for group, keys in ((1, 500), (4, 2000), (32, 8000)):
            for pair in ((d, dv) for d in dims for dv in dims):
                decided = bindings.plan(call((1, 32, 32 // group), (1, keys), pair), DEVICES["h100"])["backend"]
                self.assertNotEqual(decided, "stock", f"{pair}, groups of {group}, {keys} keys")


def test_every_family_runs_on_a_device_preset() -> None:
    alone = {family.backend for family in FAMILIES if not any(family.runs_on(gpu["cc"]) for gpu in DEVICES.values())}
    assert not alone, "explain(device=...) cannot ask for them: api.DEVICES has none of their GPUs"
