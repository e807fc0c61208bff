"""Coexistence with a second library with kernels at attention ops of torch.

cudnn.torch and FlashAttention-4 are such libraries. Run this file with the order of events as the argument; the file
prints "right" at the end. Each order has a separate process, because imports happen only once.
"""

from __future__ import annotations

import sys

import torch

VARLEN = ("_varlen_attn", "_varlen_attn_out", "_varlen_attn_backward")
FUSED = tuple(
    f"_scaled_dot_product_{backend}_attention{suffix}" for backend in ("cudnn", "flash") for suffix in ("", "_backward")
)
FLASH = ("_flash_attention_forward", "_flash_attention_backward")
HAS_CUDA_OPS = torch.version.cuda is not None  # kernels of torch for aten ops are registered at the CUDA key


class ForeignLibrary:
    """Simulated foreign library with kernels at the CUDA key of each op.

    For varlen_attn the library also registers kernels at the CPU key, where the test can call them.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.libraries = [torch.library.Library(namespace, "IMPL") for namespace in ("torch_attn", "aten")]
        for name in VARLEN:
            for key in ("CUDA", "CPU"):
                self.libraries[0].impl(name, self._body(name), key)
        for name in (*FUSED, *FLASH) if HAS_CUDA_OPS else ():
            self.libraries[1].impl(name, self._body(name), "CUDA")

    def _body(self, name: str):
        def body(query: torch.Tensor, *args: object, **settings: object) -> tuple[torch.Tensor, ...]:
            self.calls.append(name)
            lse, state = torch.zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)
            return torch.full_like(query, 7.0), lse, state

        return body

    def remove(self) -> None:
        for library in self.libraries:
            library._destroy()


def kernel_owner(op: str, key: str = "CUDA") -> str:
    """Return the owner of the kernel at a dispatch key: "plugin", "foreign", "torch" or "nobody"."""
    lines = torch._C._dispatch_dump(op).splitlines()
    line = next((line for line in lines if line.startswith(f"{key}: ")), "")
    if not line:
        return "nobody"
    return "plugin" if "torch_flashplug" in line else "foreign" if __file__ in line else "torch"


def owners() -> dict[str, set[str]]:
    """Return the owners of each group of ops."""
    groups = {"varlen": [f"torch_attn::{name}" for name in VARLEN]}
    if HAS_CUDA_OPS:
        groups |= {"fused": [f"aten::{name}" for name in FUSED], "flash": [f"aten::{name}" for name in FLASH]}
    return {name: {kernel_owner(op) for op in ops} for name, ops in groups.items()}


def all_owned_by(owner: str) -> bool:
    return all(group_owners == {owner} for group_owners in owners().values())


def run_varlen_attn() -> torch.Tensor:
    from torch.nn.attention import varlen

    q = torch.ones(9, 2, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.no_grad():
        return varlen.varlen_attn(q, q, q, cu, cu, 5, 5)


def runs_foreign_kernel(foreign: ForeignLibrary) -> bool:
    foreign.calls.clear()
    return bool((run_varlen_attn() == 7).all()) and foreign.calls == ["_varlen_attn"]


def reports_foreign_kernels() -> bool:
    """Return True if both `explain_varlen` and `info` name the foreign library."""
    import torch_flashplug
    from torch_flashplug.cli import env_info

    q, cu = torch.ones(9, 2, 64, dtype=torch.bfloat16), torch.tensor([0, 4, 9], dtype=torch.int32)
    plan = torch_flashplug.explain_varlen(q, q, q, cu, cu, 5, 5, device="h100")
    foreign_kernels = env_info.collect()["kept_by_others"]
    aten_groups = {"flash attention", "F.sdpa's cudnn attention", "F.sdpa's flash attention"} if HAS_CUDA_OPS else set()
    names_file = plan.backend == "stock" and __file__ in plan.reasons["fa3"]
    return (
        names_file
        and set(foreign_kernels) == {"varlen_attn"} | aten_groups
        and all(__file__ in path for path in foreign_kernels.values())
    )


def reports_own_kernels() -> bool:
    import torch_flashplug
    from torch_flashplug.cli import env_info

    q, cu = torch.ones(9, 2, 64, dtype=torch.bfloat16), torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch_flashplug.sdpa_backend("fa3"):
        plan = torch_flashplug.explain_varlen(q, q, q, cu, cu, 5, 5, device="h100")
    return plan.backend == "fa3" and not env_info.collect()["kept_by_others"]


def foreign_then_plugin_then_ops() -> None:
    """Register both before the import that defines the ops of varlen_attn."""
    foreign = ForeignLibrary()
    from torch_flashplug.torch_hooks import varlen_attn as varlen_attn_hook

    assert "torch.nn.attention.varlen" not in sys.modules
    varlen_attn_hook.install("CPU")
    assert __file__ in varlen_attn_hook.other_owner() and __file__ in varlen_attn_hook.other_owner("CPU")
    assert runs_foreign_kernel(foreign) and all_owned_by("foreign") and reports_foreign_kernels()


def foreign_then_plugin() -> None:
    from torch.nn.attention import varlen  # noqa: F401

    foreign = ForeignLibrary()
    import torch_flashplug
    from torch_flashplug.torch_hooks import varlen_attn as varlen_attn_hook

    varlen_attn_hook.install("CPU")
    assert all_owned_by("foreign") and runs_foreign_kernel(foreign) and reports_foreign_kernels()
    assert kernel_owner("torch_attn::_varlen_attn", "CPU") == "foreign"
    torch_flashplug.disable()
    assert all_owned_by("foreign") and runs_foreign_kernel(foreign)
    foreign.remove()
    torch_flashplug.enable()
    assert owners()["varlen"] == {"plugin"} and reports_own_kernels()
    if HAS_CUDA_OPS:
        assert owners()["fused"] == owners()["flash"] == {"plugin"}


def plugin_then_foreign() -> None:
    from torch.nn.attention import varlen  # noqa: F401

    import torch_flashplug
    from torch_flashplug.torch_hooks import varlen_attn as varlen_attn_hook

    varlen_attn_hook.install("CPU")
    assert all_owned_by("plugin") and reports_own_kernels()
    foreign = ForeignLibrary()
    assert all_owned_by("foreign") and runs_foreign_kernel(foreign) and reports_foreign_kernels()
    foreign.remove()
    assert all_owned_by("plugin") and kernel_owner("torch_attn::_varlen_attn", "CPU") == "plugin"
    torch_flashplug.disable()
    assert owners() == {name: {"nobody" if name == "varlen" else "torch"} for name in owners()}


def plugin_disabled_in_between() -> None:
    from torch.nn.attention import varlen  # noqa: F401

    import torch_flashplug

    foreign = ForeignLibrary()
    torch_flashplug.disable()
    assert all_owned_by("foreign") and runs_foreign_kernel(foreign)
    torch_flashplug.enable()
    assert all_owned_by("foreign") and runs_foreign_kernel(foreign) and reports_foreign_kernels()
    torch_flashplug.disable()
    assert all_owned_by("foreign") and runs_foreign_kernel(foreign)
    foreign.remove()
    assert owners() == {name: {"nobody" if name == "varlen" else "torch"} for name in owners()}
    torch_flashplug.enable()
    assert all_owned_by("plugin") and reports_own_kernels()


ORDERS = {
    order.__name__: order
    for order in (foreign_then_plugin_then_ops, foreign_then_plugin, plugin_then_foreign, plugin_disabled_in_between)
}

if __name__ == "__main__":
    ORDERS[sys.argv[1]]()
    print("right")
