"""C++ core below the dispatcher: hook, modes, launch ABI, layouts and start-up of the package. No test needs a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import compile_cpp
import pytest
import torch

from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES, SPLITS_SHIFT
from torch_flashplug.codegen.kernel_request import CallConditions
from torch_flashplug.dispatch import bindings, callbacks, table_structs
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


def test_mode_is_per_thread_and_process_backend_takes_precedence() -> None:
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
    """Return the CPU and CUDA entries of the choice stub of torch, read without the plugin."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return list((ctypes.c_void_p * 2).in_dll(library, "_ZN2at6native22_fused_sdp_choice_stubE"))


def test_uninstall_restores_the_pointer() -> None:
    before = slot_pointers()
    assert bindings.install(bindings.CPU_SLOT) == 0
    assert slot_pointers()[bindings.CPU_SLOT] != before[bindings.CPU_SLOT]
    assert bindings.install(bindings.CPU_SLOT) == 0  # a second call changes nothing
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
SAME(decode_sm90_bf16_d64_full_m64n64s3)
SAME(fwd_sm80_bf16_d64_full_m64n64s1)
SAME(fwd_sm80_bf16_d64_full_m64n64s1e)
SAME(bwd_sm90_bf16_d64_full_m64n128s4)
SAME(partbwd_sm90_bf16_d64_full_m64n64s4)
"""


@pytest.fixture
def fake_pack(tmp_path: Path) -> Iterator[ctypes.CDLL]:
    """Provide a kernel pack for CPU memory, so that a call reaches a symbol of the pack.

    The kernel only records its arguments.
    """
    (tmp_path / "pack.c").write_text(FAKE_PACK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "pack.so", tmp_path / "pack.c"], check=True)
    bindings.push_rows(KERNELS, (), dispatch_table.COST_MODEL)
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


def record_of_kernel(pack: ctypes.CDLL) -> list[int]:
    return list((ctypes.c_int64 * 128).in_dll(pack, "seen"))


OVERRIDEABLE_OP = torch.ops.aten._scaled_dot_product_fused_attention_overrideable

NONE, INTEGER, REAL, POINTER, TENSOR = 0, 1, 3, 4, 7  # types of TVM-FFI
DLPACK = {  # DLPack type codes and bits of the arguments of bf16 kernels
    **dict.fromkeys(("query", "key", "value", "output"), (4, 16)), "fp32": (2, 32), "int32": (0, 32),
}  # fmt: skip


def expected_record(
    parameters: tuple[Argument, ...], strides: dict[str, list[int]], numbers: dict[str, int]
) -> list[int]:
    """Return the record of a kernel with these arguments; arguments without an expected value are recorded as None."""
    record = [len(parameters) + 1]
    for parameter in parameters:
        if parameter.name in strides:
            record += [TENSOR, parameter.rank, *DLPACK[parameter.dtype], *strides[parameter.name]]
        elif parameter.is_scalar and not parameter.is_optional:
            record += [INTEGER, numbers[parameter.name]] if parameter.dtype == "int32" else [REAL]
        else:
            record += [NONE]
    return [*record, POINTER]


def assert_recorded(pack: ctypes.CDLL, noted: list[int]) -> None:
    assert record_of_kernel(pack)[: len(noted)] == noted


def test_launch_packs_the_kernel_abi(fake_pack: ctypes.CDLL) -> None:
    """Check the order and types of the arguments, the strides of size-1 dims, and both scales."""
    query = torch.zeros(1, 3, 5, 40, dtype=torch.bfloat16).as_strided((1, 3, 5, 40), (7, 200, 40, 1))
    key = torch.zeros(1, 1, 6, 40, dtype=torch.bfloat16).expand(1, 3, 6, 40)
    OVERRIDEABLE_OP(query, key, key, scale=0.5)
    q, kv = [40, 200, 40, 1], [40, 0, 40, 1]
    strides = {"q": q, "k": kv, "v": kv, "o": q, "lse": [8, 5, 1], "counter": [1]}
    assert_recorded(fake_pack, expected_record(FORWARD, strides, {"num_ctas": DEVICES["h100"]["sm_count"]}))
    assert list((ctypes.c_double * 2).in_dll(fake_pack, "scales")) == pytest.approx([0.5 * 1.4426950408889634, 0.5])


def test_launch_packs_the_abi_of_decode(fake_pack: ctypes.CDLL) -> None:
    """Check the workspace of partial results. Without splits, the kernel still gets an address."""
    query = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
    key = torch.zeros(1, 2, 2048, 64, dtype=torch.bfloat16)
    q, kv, shared = [64, 64, 64, 1], [64, 131072, 64, 1], {"lse": [4, 1, 1], "partials": [1]}
    bindings.push_rows((*KERNELS, KernelRow("decode", 90, 64, 64, ("full",), 64, 64, 3)), (), dispatch_table.COST_MODEL)
    for splits, cluster in ((1, 1), (2, 2), (9, 1)):
        bindings.set_mode(FA3 | splits << SPLITS_SHIFT)
        OVERRIDEABLE_OP(query, key, key)
        numbers = {"splits": splits, "cluster": cluster}
        assert_recorded(fake_pack, expected_record(DECODE, {"q": q, "k": kv, "v": kv, "o": q, **shared}, numbers))


def test_launch_packs_the_abi_of_the_backward(fake_pack: ctypes.CDLL) -> None:
    """Check the backward kernel for all gradients, and the split backward with the `needs_grad` flag for dQ alone."""
    backward_rows = (
        KernelRow("bwd", 90, 64, 64, ("full",), 64, 128, 4),
        KernelRow("partbwd", 90, 64, 64, ("full",), 64, 64, 4),
    )
    bindings.push_rows((*KERNELS, *backward_rows), (), dispatch_table.COST_MODEL)
    row_strides, key_strides = [17920, 64, 256, 1], [25600, 12800, 64, 1]
    strides = dict.fromkeys(("q", "o", "do", "dq"), row_strides) | dict.fromkeys(("k", "v", "dk", "dv"), key_strides)
    strides |= {"lse": [280, 70, 1], "row_stats": [1024, 256, 128, 1], "dq_workspace": [1], "counter": [1]}
    for keys_too, wanted_flag in ((True, 3), (False, 1)):
        query, grad = (torch.zeros(2, 70, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
        key, value = (torch.zeros(2, 2, 200, 64, dtype=torch.bfloat16, requires_grad=keys_too) for _ in range(2))
        OVERRIDEABLE_OP(query.requires_grad_(), key, value, scale=0.5)[0].backward(grad)
        numbers = {"num_ctas": DEVICES["h100"]["sm_count"], "needs_grad": wanted_flag}
        assert_recorded(fake_pack, expected_record(BACKWARD, strides, numbers))
        assert list((ctypes.c_double * 2).in_dll(fake_pack, "scales")) == pytest.approx([0.5 * 1.4426950408889634, 0.5])


@pytest.fixture
def record_of_first_argument(fake_pack: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return a function that adds a first argument to forward kernels and returns the start of the kernel's record.

    An optional argument belongs to the dropout feature.
    """
    stock_of_kernels, query = table_structs.of_kernels, torch.zeros(1, 1, 5, 64, dtype=torch.bfloat16)
    known_features = features.FEATURES

    def call(argument: Argument, dropout: bool = False) -> list[int]:
        def of_kernels(row: KernelRow) -> Iterator[table_structs.KernelRow]:
            for kernel in stock_of_kernels(row):
                kernel.takes |= features.bits(["dropout"] * dropout)
                yield kernel

        dropout_arguments = {"dropout": (argument.name,) * argument.is_optional}
        changed = [
            dataclasses.replace(feature, arguments=(*feature.arguments, *dropout_arguments.get(feature.name, ())))
            for feature in known_features
        ]
        monkeypatch.setattr(features, "FEATURES", tuple(changed))
        monkeypatch.setattr(table_structs, "of_kernels", of_kernels)
        monkeypatch.setitem(kernel_args.ARGUMENTS_BY_KIND, "fwd", (argument, *FORWARD))
        bindings.push_rows(KERNELS, (), dispatch_table.COST_MODEL)
        OVERRIDEABLE_OP(query, query, query, None, 0.5 * dropout)
        return record_of_kernel(fake_pack)[:3]

    return call


COUNT = len(FORWARD) + 2  # plus one for the stream


def test_kernel_receives_each_argument_of_its_signature(record_of_first_argument: Callable[..., list[int]]) -> None:
    """Pass a fact of the call without further setup.

    An argument that no launch provides, or that the current launch does not provide, is an error.
    """
    assert record_of_first_argument(kernel_args._number("Sq", "int32", "a fact")) == [COUNT, INTEGER, 5]
    with pytest.raises(RuntimeError, match="takes dq_workspace, but the call does not provide"):
        record_of_first_argument(kernel_args._tensor("dq_workspace", 1, "fp32", "no forward's"))
    with pytest.raises(RuntimeError, match="no call has an argument named fnord"):
        record_of_first_argument(kernel_args._number("fnord", "int32", "no call's"))


def test_feature_argument_is_none_for_kernels_without_the_feature(
    record_of_first_argument: Callable[..., list[int]],
) -> None:
    fact = kernel_args._number("dropout_p", "fp32", "filled by itself", is_optional=True)
    splits = kernel_args._number("splits", "int32", "said by every forward", is_optional=True)
    workspace = kernel_args._tensor("dq_workspace", 1, "fp32", "said by none", is_optional=True)
    assert (
        record_of_first_argument(fact)
        == record_of_first_argument(splits)
        == record_of_first_argument(workspace)
        == [COUNT, NONE, TENSOR]
    )
    assert record_of_first_argument(fact, dropout=True) == [COUNT, REAL, TENSOR]
    assert record_of_first_argument(splits, dropout=True) == [COUNT, INTEGER, 1]
    with pytest.raises(RuntimeError, match="takes dq_workspace, but the call does not provide"):
        record_of_first_argument(workspace, dropout=True)


def test_kernel_errors_contain_the_kernel_name(fake_pack: ctypes.CDLL) -> None:
    """Force a backend without a kernel pack and without a compiler.

    The error must contain the kernel name and the message of the Python callback.
    """
    bindings.clear_packs()
    callbacks.set_compile_callback(lambda name, cc, circumstances: "not today")
    query = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    try:
        with pytest.raises(RuntimeError, match=r"fwd_sm90_fp16_d64_full_m128n128s2.*not today"):
            OVERRIDEABLE_OP(query, query, query)
    finally:
        callbacks.set_compile_callback(startup.provide)


def test_elementwise_kernels_receive_unchanged_strides(fake_pack: ctypes.CDLL) -> None:
    """Check all four tensors. The output has the layout of the query."""
    bindings.set_mode(FA2)
    query = torch.zeros(1, 2, 12, 5, dtype=torch.bfloat16).transpose(2, 3)  # (1, 2, 5, 12), the row dim is innermost
    key = torch.zeros(1, 2, 6, 13, dtype=torch.bfloat16)[..., 1:]
    out = OVERRIDEABLE_OP(query, key, key)[0]
    strides = [record_of_kernel(fake_pack)[1 + 8 * i : 9 + 8 * i][4:] for i in range(4)]
    assert strides == [[16, 60, 1, 5], [16, 78, 13, 1], [16, 78, 13, 1], [16, 60, 1, 5]]
    assert out.stride() == query.stride()


def test_kernels_are_searched_in_packs_for_the_current_gpu(fake_pack: ctypes.CDLL, tmp_path: Path) -> None:
    """Launch a kernel on GPUs of two generations.

    Each kernel is searched in the packs for the current GPU, or compiled for the current GPU.
    """
    requests = []
    bindings.set_mode(FA2)
    bindings.clear_packs()
    for target in TARGETS:
        bindings.load_pack(tmp_path / "pack.so" if target == "sm_80" else None, target)
    callbacks.set_compile_callback(
        lambda name, cc, circumstances: requests.append((name, cc, circumstances)) or "not today"
    )
    query = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    try:
        for device in ("a100", "rtx4090"):
            bindings.set_facts_override(DEVICES[device])
            OVERRIDEABLE_OP(query, query, query)
        with pytest.raises(RuntimeError, match=r"fwd_sm80_bf16_d64.*no kernel pack for this GPU.*not today"):
            bindings.set_facts_override(DEVICES["h100"])
            OVERRIDEABLE_OP(query, query, query)
    finally:
        callbacks.set_compile_callback(startup.provide)
    assert requests == [("fwd_sm80_bf16_d64_full_m64n64s1", 90, CallConditions(is_capturing=False, must_wait=True))]


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
def test_output_strides_match_the_fake_and_meta_functions(
    fake_pack: ctypes.CDLL, layout: str, value_dim: int | None
) -> None:
    """Compare output strides with our fake implementation and with the meta function of torch.

    The strides of torch for broadcast queries changed before 2.15.
    """
    query = LAYOUTS[layout]
    value = query[..., :value_dim]
    fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (query, query, value)]
    out = OVERRIDEABLE_OP(query, query, value)[0]
    assert out.stride() == sdpa.empty_in_layout_of(query, (*query.shape[:3], value.shape[3])).stride()
    if 0 not in query.stride():
        assert out.stride() == OVERRIDEABLE_OP(*fakes)[0].stride()
    record = record_of_kernel(fake_pack)
    kernel_out = record[1 + 3 * 8 :][4:8]
    assert kernel_out[3] == 1  # the last dim of a kernel output is always innermost
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
def test_entry_point_activates_only_on_request(order: str, flag: str | None, expected: str) -> None:
    """Check when the entry point activates the plugin: only with TORCH_FLASHPLUG=1 or after an import.

    Every program of the environment runs the entry point.
    """
    assert run_python(order + STATE, **({} if flag is None else {"TORCH_FLASHPLUG": flag})) == expected


def test_entry_point_never_raises() -> None:
    """A broken plugin must not break `import torch`."""
    code = "import warnings; warnings.simplefilter('ignore')\nimport torch\nprint(torch.ones(1).item())"
    assert run_python(code, TORCH_FLASHPLUG="1", TORCH_FLASHPLUG_BACKEND="no such backend") == "1.0"


def test_torch_logs_shows_each_plan_once() -> None:
    """Log each plan only once.

    TORCH_LOGS makes torch import the plugin before torch sets the levels of the plugin's loggers. The package must
    still log.
    """
    code = """
import sys
sys.path.insert(0, "test/helpers")
import torch, torch_flashplug
from device_backend import use_device_backend
with use_device_backend("cpu") as device_backend:
    q, k, v = device_backend.qkv()
    for _ in range(3):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""
    log = run_python(code, TORCH_LOGS="+torch_flashplug", stderr=True)
    assert log.count("choice hook: ") == 1
    assert '"backend": "fa3"' in log


def test_disabled_plugin_does_not_load_the_core() -> None:
    code = "import torch_flashplug\nfrom torch_flashplug.dispatch import library\n"
    code += "print(library.lib.cache_info().currsize)"
    assert run_python(code, TORCH_FLASHPLUG="0") == "0"


COUNTERS_WITHOUT_MEMORY = """
#include <cstring>
#include "launch/counters.cpp"
namespace flashplug {
CpuStub cpu_stub() { return CpuStub::kOff; }
bool stream_is_capturing(void* stream) { return stream != nullptr; }
void* device_zeros(size_t) { return nullptr; }
}
extern "C" void fail(int captured, char* text) try {
  flashplug::launch_counter(0, captured ? text : nullptr);
} catch (const std::exception& error) {
  std::strcpy(text, error.what());
}
"""


def test_error_without_memory_for_counters_states_the_size(tmp_path: Path) -> None:
    assert compile_cpp.compiles(COUNTERS_WITHOUT_MEMORY, "-shared", "-fPIC", "-o", str(tmp_path / "counters.so"))
    library, text = ctypes.CDLL(str(tmp_path / "counters.so")), ctypes.create_string_buffer(200)
    for captured, size in ((False, "256 KiB"), (True, "64 KiB")):
        library.fail(captured, text)
        assert f"no free memory for the launch counters ({size})" in text.value.decode()
