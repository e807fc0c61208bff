"""The C++ core below the dispatcher's rule: hook, modes, launch ABI, layouts, start-up of the package. No GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES, SPLITS_SHIFT
from torch_flashplug.codegen.provided import Circumstances
from torch_flashplug.dispatch import bindings, callbacks
from torch_flashplug.dispatch import table_structs as rows
from torch_flashplug.ops import sdpa
from torch_flashplug.registry import dispatch_table, features, kernel_args
from torch_flashplug.registry.architectures import BACKENDS, TARGETS
from torch_flashplug.registry.kernel_args import BACKWARD, DECODE, FORWARD, Argument
from torch_flashplug.registry.kernel_table import KernelRow

KERNELS = (
    KernelRow("fwd", 90, 64, 64, ("full",), 128, 128, 2),
    KernelRow("fwd", 90, 128, 128, ("full",), 128, 128, 2),
    KernelRow("fwd", 80, 64, 64, ("full",), 64, 64, 1),
    KernelRow("fwd", 80, 64, 64, ("full",), 64, 64, 1, elementwise=True),
)

FA3, FA2, STOCK = (BACKENDS.index(name) for name in ("fa3", "fa2", "stock"))


def test_mode_word_is_per_thread_and_process_backend_goes_first() -> None:
    before = bindings.set_mode(3)
    try:
        assert bindings.mode() == 3
        bindings.set_process_backend(STOCK)
        assert bindings.backend_of(bindings.effective_mode()) == "stock"
        bindings.set_process_backend(FA2)
        assert bindings.backend_of(bindings.effective_mode()) == "fa2"
        assert bindings.forced_kernels(bindings.effective_mode()) is None and bindings.forced_kernels(FA2) == "fa2"
    finally:
        bindings.set_process_backend(0)
        bindings.set_mode(before)


def slot_pointers() -> list[int | None]:
    """The CPU and CUDA slots of torch's choice stub, read behind the plugin's back."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return list((ctypes.c_void_p * 2).in_dll(library, "_ZN2at6native22_fused_sdp_choice_stubE"))


def test_uninstall_restores_the_pointer() -> None:
    before = slot_pointers()
    assert bindings.install(bindings.CPU_SLOT) == 0
    assert slot_pointers()[bindings.CPU_SLOT] != before[bindings.CPU_SLOT]
    assert bindings.install(bindings.CPU_SLOT) == 0  # twice is once
    assert bindings.uninstall(bindings.CPU_SLOT) == 0
    assert slot_pointers() == before
    assert bindings.uninstall(bindings.CPU_SLOT) != 0
    assert "not in place" in bindings.last_error()


FAKE_PACK = r"""
#include <stdint.h>
#include <string.h>
typedef struct { int32_t type; uint32_t pad; union { int64_t i; double f; void *p; } v; } Any;
typedef struct { void *data; struct { int32_t type, id; } device; int32_t ndim;
                 struct { uint8_t code, bits; uint16_t lanes; } dtype;
                 int64_t *shape, *strides; uint64_t offset; } Tensor;
int64_t seen[128], *out; double scales[2];
static void note(const Any *x) {  // type; of a tensor rank, dtype, strides, of a number its value
  *out++ = x->type;
  if (x->type == 1) *out++ = x->v.i;
  if (x->type != 7) return;
  const Tensor *t = x->v.p;
  *out++ = t->ndim; *out++ = t->dtype.code; *out++ = t->dtype.bits;
  for (int j = 0; j < t->ndim; ++j) *out++ = t->strides[j];
}
int __tvm_ffi_fwd_sm90_bf16_d64_full_m128n128s2(void *self, const Any *args, int32_t n, Any *result) {
  int reals = 0;
  out = seen;
  *out++ = n;
  for (int i = 0; i < n; ++i) {
    note(&args[i]);
    if (args[i].type == 3) scales[reals++ % 2] = args[i].v.f;
  }
  return 0;
}
#define SAME(name) int __tvm_ffi_##name(void *self, const Any *args, int32_t n, Any *result) { \
  return __tvm_ffi_fwd_sm90_bf16_d64_full_m128n128s2(self, args, n, result); }
SAME(fwd_sm90_bf16_d128_full_m128n128s2)
SAME(decode_sm90_bf16_d64_full_m64n64s2)
SAME(fwd_sm80_bf16_d64_full_m64n64s1)
SAME(fwd_sm80_bf16_d64_full_m64n64s1e)
SAME(bwd_sm90_bf16_d64_full_m64n128s4)
SAME(partbwd_sm90_bf16_d64_full_m64n64s4)
"""


@pytest.fixture
def fake_pack(tmp_path: Path) -> Iterator[ctypes.CDLL]:
    """The whole road down to a pack's symbol, on CPU memory; the kernel only notes its arguments."""
    (tmp_path / "pack.c").write_text(FAKE_PACK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "pack.so", tmp_path / "pack.c"], check=True)
    bindings.push_rows(KERNELS, (), dispatch_table.GATE)
    bindings.set_facts_override(DEVICES["h100"])
    bindings.set_cpu_stub(2)
    bindings.clear_packs()
    bindings.load_pack(tmp_path / "pack.so", "sm_90a")
    bindings.register_ops("CPU", own_ops=False)
    bindings.set_mode(FA3)
    yield ctypes.CDLL(str(tmp_path / "pack.so"))
    bindings.set_mode(0)
    bindings.unregister_ops()
    bindings.register_ops("CUDA")
    bindings.clear_packs()
    bindings.set_cpu_stub(0)
    bindings.set_facts_override(None)
    startup.push_tables()


def seen_by_kernel(pack: ctypes.CDLL) -> list[int]:
    return list((ctypes.c_int64 * 128).in_dll(pack, "seen"))


CARRIER = torch.ops.aten._scaled_dot_product_fused_attention_overrideable

NONE, INTEGER, REAL, POINTER, TENSOR = 0, 1, 3, 4, 7  # TVM-FFI's types
DLPACK = {  # code and bits, of bf16 kernels
    **dict.fromkeys(("query", "key", "value", "output"), (4, 16)), "fp32": (2, 32), "int32": (0, 32),
}  # fmt: skip


def expected(taken: tuple[Argument, ...], strides: dict[str, list[int]], numbers: dict[str, int]) -> list[int]:
    """What a kernel with these arguments notes; those of which nothing is said are None."""
    noted = [len(taken) + 1]
    for one in taken:
        if one.name in strides:
            noted += [TENSOR, one.rank, *DLPACK[one.dtype], *strides[one.name]]
        elif one.scalar and not one.optional:
            noted += [INTEGER, numbers[one.name]] if one.dtype == "int32" else [REAL]
        else:
            noted += [NONE]
    return [*noted, POINTER]


def assert_noted(pack: ctypes.CDLL, noted: list[int]) -> None:
    assert seen_by_kernel(pack)[: len(noted)] == noted


def test_launch_packs_the_kernel_abi(fake_pack: ctypes.CDLL) -> None:
    """The arguments of the table in its order; their types, strides of size-1 dims, both scales."""
    query = torch.zeros(1, 3, 5, 40, dtype=torch.bfloat16).as_strided((1, 3, 5, 40), (7, 200, 40, 1))
    key = torch.zeros(1, 1, 6, 40, dtype=torch.bfloat16).expand(1, 3, 6, 40)
    CARRIER(query, key, key, scale=0.5)
    q, kv = [40, 200, 40, 1], [40, 0, 40, 1]
    strides = {"q": q, "k": kv, "v": kv, "o": q, "lse": [8, 5, 1], "counter": [1]}
    assert_noted(fake_pack, expected(FORWARD, strides, {"num_ctas": DEVICES["h100"]["sm_count"]}))
    assert list((ctypes.c_double * 2).in_dll(fake_pack, "scales")) == pytest.approx([0.5 * 1.4426950408889634, 0.5])


def test_launch_packs_the_abi_of_decode(fake_pack: ctypes.CDLL) -> None:
    """Partial results in memory, or, where there are none, an address all the same."""
    query = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
    key = torch.zeros(1, 2, 2048, 64, dtype=torch.bfloat16)
    q, kv, shared = [64, 64, 64, 1], [64, 131072, 64, 1], {"lse": [4, 1, 1], "partials": [1]}
    bindings.push_rows((*KERNELS, KernelRow("decode", 90, 64, 64, ("full",), 64, 64, 2)), (), dispatch_table.GATE)
    for splits, cluster in ((1, 1), (2, 2), (9, 1)):
        bindings.set_mode(FA3 | splits << SPLITS_SHIFT)
        CARRIER(query, key, key)
        numbers = {"splits": splits, "cluster": cluster}
        assert_noted(fake_pack, expected(DECODE, {"q": q, "k": kv, "v": kv, "o": q, **shared}, numbers))


def test_launch_packs_the_abi_of_the_backward(fake_pack: ctypes.CDLL) -> None:
    """All gradients by one kernel; in parts, with what is wanted, where dQ alone is."""
    rows = (KernelRow("bwd", 90, 64, 64, ("full",), 64, 128, 4), KernelRow("partbwd", 90, 64, 64, ("full",), 64, 64, 4))
    bindings.push_rows((*KERNELS, *rows), (), dispatch_table.GATE)
    of_rows, of_keys = [17920, 64, 256, 1], [25600, 12800, 64, 1]
    strides = dict.fromkeys(("q", "o", "do", "dq"), of_rows) | dict.fromkeys(("k", "v", "dk", "dv"), of_keys)
    strides |= {"lse": [280, 70, 1], "rows": [1024, 256, 128, 1], "scratch": [1], "counter": [1]}
    for keys_too, wanted in ((True, 3), (False, 1)):
        query, grad = (torch.zeros(2, 70, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
        key, value = (torch.zeros(2, 2, 200, 64, dtype=torch.bfloat16, requires_grad=keys_too) for _ in range(2))
        CARRIER(query.requires_grad_(), key, value, scale=0.5)[0].backward(grad)
        numbers = {"num_ctas": DEVICES["h100"]["sm_count"], "wanted": wanted}
        assert_noted(fake_pack, expected(BACKWARD, strides, numbers))
        assert list((ctypes.c_double * 2).in_dll(fake_pack, "scales")) == pytest.approx([0.5 * 1.4426950408889634, 0.5])


@pytest.fixture
def take(fake_pack: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """What forwards see first if they take one argument more, the first, which is dropout's if it is optional."""
    known, query = rows.of_kernels, torch.zeros(1, 1, 5, 64, dtype=torch.bfloat16)
    known_features = features.FEATURES

    def call(argument: Argument, dropout: bool = False) -> list[int]:
        def of_kernels(row: KernelRow) -> Iterator[rows.KernelRow]:
            for kernel in known(row):
                kernel.takes |= features.bits(["dropout"] * dropout)
                yield kernel

        more = {"dropout": (argument.name,) * argument.optional}
        changed = [
            dataclasses.replace(one, arguments=(*one.arguments, *more.get(one.name, ()))) for one in known_features
        ]
        monkeypatch.setattr(features, "FEATURES", tuple(changed))
        monkeypatch.setattr(rows, "of_kernels", of_kernels)
        monkeypatch.setitem(kernel_args.OF_KIND, "fwd", (argument, *FORWARD))
        bindings.push_rows(KERNELS, (), dispatch_table.GATE)
        CARRIER(query, query, query, None, 0.5 * dropout)
        return seen_by_kernel(fake_pack)[:3]

    return call


COUNT = len(FORWARD) + 2  # and the stream


def test_a_kernel_gets_all_that_it_takes(take: Callable[..., list[int]]) -> None:
    """A fact of the call by itself; what no launch can have, or this one does not, is an error."""
    assert take(kernel_args._number("Sq", "int32", "a fact")) == [COUNT, INTEGER, 5]
    with pytest.raises(RuntimeError, match="takes scratch, but the call does not provide"):
        take(kernel_args._tensor("scratch", 1, "fp32", "no forward's"))
    with pytest.raises(RuntimeError, match="no call has an argument named fnord"):
        take(kernel_args._number("fnord", "int32", "no call's"))


def test_an_argument_of_a_feature_is_none_to_kernels_without_it(take: Callable[..., list[int]]) -> None:
    fact = kernel_args._number("dropout_p", "fp32", "filled by itself", optional=True)
    said = kernel_args._number("splits", "int32", "said by every forward", optional=True)
    scratch = kernel_args._tensor("scratch", 1, "fp32", "said by none", optional=True)
    assert take(fact) == take(said) == take(scratch) == [COUNT, NONE, TENSOR]
    assert take(fact, dropout=True) == [COUNT, REAL, TENSOR]
    assert take(said, dropout=True) == [COUNT, INTEGER, 1]
    with pytest.raises(RuntimeError, match="takes scratch, but the call does not provide"):
        take(scratch, dropout=True)


def test_kernel_errors_carry_their_name(fake_pack: ctypes.CDLL) -> None:
    """No pack and no compiler, under a forced backend: the error names the kernel, and what Python says of it."""
    bindings.clear_packs()
    callbacks.set_compile(lambda name, cc, given: "not today")
    query = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    try:
        with pytest.raises(RuntimeError, match=r"fwd_sm90_fp16_d64_full_m128n128s2.*not today"):
            CARRIER(query, query, query)
    finally:
        callbacks.set_compile(startup.provide)


def test_elementwise_kernels_get_strides_as_they_are(fake_pack: ctypes.CDLL) -> None:
    """All four of them, the output's too, which lies as the query does."""
    bindings.set_mode(FA2)
    query = torch.zeros(1, 2, 12, 5, dtype=torch.bfloat16).transpose(2, 3)  # (1, 2, 5, 12), rows innermost
    key = torch.zeros(1, 2, 6, 13, dtype=torch.bfloat16)[..., 1:]
    out = CARRIER(query, key, key)[0]
    strides = [seen_by_kernel(fake_pack)[1 + 8 * i : 9 + 8 * i][4:] for i in range(4)]
    assert strides == [[16, 60, 1, 5], [16, 78, 13, 1], [16, 78, 13, 1], [16, 60, 1, 5]]
    assert out.stride() == query.stride()


def test_a_pack_is_its_gpus(fake_pack: ctypes.CDLL, tmp_path: Path) -> None:
    """One kernel on GPUs of two generations: each is looked for where code for that GPU is, or compiled for it."""
    asked = []
    bindings.set_mode(FA2)
    bindings.clear_packs()
    for target in TARGETS:
        bindings.load_pack(tmp_path / "pack.so" if target == "sm_80" else None, target)
    callbacks.set_compile(lambda name, cc, given: asked.append((name, cc, given)) or "not today")
    query = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    try:
        for device in ("a100", "rtx4090"):
            bindings.set_facts_override(DEVICES[device])
            CARRIER(query, query, query)
        with pytest.raises(RuntimeError, match=r"fwd_sm80_bf16_d64.*no kernel pack for this GPU.*not today"):
            bindings.set_facts_override(DEVICES["h100"])
            CARRIER(query, query, query)
    finally:
        callbacks.set_compile(startup.provide)
    assert asked == [("fwd_sm80_bf16_d64_full_m64n64s1", 90, Circumstances(capturing=False, must_wait=True))]


BASE = torch.zeros(2, 8, 4, 80, dtype=torch.bfloat16)
LAYOUTS = {
    "bhsd": BASE,
    "bshd": BASE.transpose(1, 2),
    "sbhd": BASE.permute(2, 1, 0, 3),
    "slice": BASE[..., :64],
    "one": BASE[:1],
    "expanded": BASE[:1].expand(2, 8, 4, 80),
    "expanded_heads": BASE[:, :1].expand(2, 8, 4, 80).transpose(1, 2),
}


@pytest.mark.parametrize("value_dim", [64, 48, None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_strides_are_promised_ones(fake_pack: ctypes.CDLL, layout: str, value_dim: int | None) -> None:
    """Outputs lie as our fake says, and as torch's meta function does (which changed for broadcast queries by 2.15)."""
    query = LAYOUTS[layout]
    value = query[..., :value_dim]
    fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (query, query, value)]
    out = CARRIER(query, query, value)[0]
    assert out.stride() == sdpa.empty_in_layout_of(query, (*query.shape[:3], value.shape[3])).stride()
    if 0 not in query.stride():
        assert out.stride() == CARRIER(*fakes)[0].stride()
    seen = seen_by_kernel(fake_pack)
    kernel_out = seen[1 + 3 * 8 :][4:8]
    assert kernel_out[3] == 1  # what the kernel writes always has its last dim innermost
    assert all(stride % 8 == 0 for stride in kernel_out[:3])


AUTOLOAD = """
import importlib.metadata, sys
class Point:
    name = "torch_flashplug"
    def load(self):
        from torch_flashplug._autoload import hook
        return hook
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **kw: [Point()] if kw.get("group") == "torch.backends" else real(**kw)
"""


def run_python(code: str, stderr: bool = False, **environment: str) -> str:
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("TORCH_FLASHPLUG") and k != "TORCH_DEVICE_BACKEND_AUTOLOAD"
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", AUTOLOAD + code],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (done.stderr if stderr else done.stdout).strip()


STATE = """
package = sys.modules.get("torch_flashplug")
print("absent" if package is None else "active" if hasattr(package, "enable") else "inert")
"""


@pytest.mark.parametrize(
    ("order", "flag", "expected"),
    [
        ("import torch", None, "absent"),
        ("import torch", "1", "active"),
        ("import torch", "0", "absent"),
        ("import torch; import torch_flashplug", None, "active"),
        ("import torch; import torch_flashplug", "1", "active"),
        ("import torch_flashplug; import torch", None, "active"),
        ("import torch_flashplug; import torch", "1", "active"),
    ],
)
def test_entry_point(order: str, flag: str | None, expected: str) -> None:
    """Every program of the environment runs our entry point; only TORCH_FLASHPLUG=1 or an import makes it count."""
    assert run_python(order + STATE, **({} if flag is None else {"TORCH_FLASHPLUG": flag})) == expected


def test_entry_point_never_raises() -> None:
    """A broken plugin must not break `import torch`."""
    code = "import warnings; warnings.simplefilter('ignore')\nimport torch\nprint(torch.ones(1).item())"
    assert run_python(code, TORCH_FLASHPLUG="1", TORCH_FLASHPLUG_BACKEND="no such backend") == "1.0"


def test_torch_logs_shows_each_plan_once() -> None:
    """TORCH_LOGS makes torch import us before it sets our loggers' levels; the package must be awake all the same."""
    code = """
import sys
sys.path.insert(0, "test")
import torch, torch_flashplug, standin
with standin.road_to("cpu") as road:
    q, k, v = road.qkv()
    for _ in range(3):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""
    log = run_python(code, TORCH_LOGS="+torch_flashplug", stderr=True)
    assert log.count("router: ") == 1
    assert '"backend": "fa3"' in log


def test_switched_off_touches_nothing() -> None:
    code = "import torch_flashplug\nfrom torch_flashplug.dispatch import library\n"
    code += "print(library.lib.cache_info().currsize)"
    assert run_python(code, TORCH_FLASHPLUG="0") == "0"
