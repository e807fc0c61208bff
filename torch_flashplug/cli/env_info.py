"""Inventory of this machine's installation and settings: the `info` verb, and facts for `check`.

The inventory reads and never changes anything. Versions come from package metadata. So no compiler is imported.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch

from .. import env
from ..codegen import dsl, kernel_cache, linker
from ..dispatch import bindings
from ..dispatch import packs as installed_packs
from ..version import __version__

PACKAGES = ("apache-tvm-ffi", "cuda-python", "cuda-bindings")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices_by_cuda_python() -> list[dict[str, object]] | None:
    """Return the facts of each GPU from the driver, without creating a CUDA context.

    Return None if cuda-python or the driver is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return None

    def ask(function, *arguments):
        status, *answer = function(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {status.name}")
        return answer[0] if answer else None

    attribute = driver.CUdevice_attribute
    attributes = {
        "sm_count": attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        "smem_bytes": attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        "l2_bytes": attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
        "clock_khz": attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
    }
    major, minor = (getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    devices = []
    try:
        ask(driver.cuInit, 0)
        for index in range(ask(driver.cuDeviceGetCount)):
            device = ask(driver.cuDeviceGet, index)
            name = ask(driver.cuDeviceGetName, 128, device).split(b"\0")[0].decode()
            cc = 10 * ask(driver.cuDeviceGetAttribute, major, device) + ask(driver.cuDeviceGetAttribute, minor, device)
            facts = {key: ask(driver.cuDeviceGetAttribute, which, device) for key, which in attributes.items()}
            devices.append({"name": name, "cc": cc, **facts, "driver": ask(driver.cuDriverGetVersion)})
    except RuntimeError:  # no driver or no device: reported as no GPU
        return None
    return devices


def _devices() -> list[dict[str, object]]:
    devices = _devices_by_cuda_python()
    if devices is not None:
        return devices
    if not torch.cuda.is_available():
        return []
    return [
        {"name": torch.cuda.get_device_name(i), **bindings.device_facts(i)} for i in range(torch.cuda.device_count())
    ]


def packs() -> list[dict[str, object]]:
    """Return the facts of each installed kernel pack, with the kernels in the pack.

    The entry "unusable" says why this machine must not load the pack; an empty text means that loading is allowed.
    """
    facts_of_packs = []
    for pack in installed_packs.installed():
        kernels = pack.kernels()
        facts = {"path": str(pack.path), "target": pack.target, "bytes": pack.path.stat().st_size}
        facts |= {"compressed": pack.is_compressed, "unusable": pack.unusable_reason()}
        if pack.is_compressed:
            place = installed_packs.unpacked_path(pack)
            facts["unpacked"] = str(place) if place else None
        facts_of_packs.append(facts | {"symbols": len(kernels), "kernels": kernels})
    return facts_of_packs


def _cache() -> dict[str, object]:
    """Return the facts of the chosen kernel cache folder, and of the fallback folder if kernels were written there."""
    fallback = _facts_of_folder(kernel_cache.fallback_folder())
    return _facts_of_folder(kernel_cache.chosen_folder()) | {"fallback": fallback if fallback["kernels"] else None}


def _facts_of_folder(folder: Path) -> dict[str, object]:
    facts: dict[str, object] = {"directory": str(folder), "kernels": 0, "bytes": 0, "problem": ""}
    try:
        files = [
            path for path in kernel_cache.entries_in(folder) if not path.name.startswith("flashplug_")
        ]  # no unpacked kernel packs
        facts |= {"kernels": len(files), "bytes": sum(path.stat().st_size for path in files)}
    except OSError as error:
        facts["problem"] = f"the folder cannot be read: {error.strerror}"
    return facts


def hook() -> dict[str, object]:
    """Return whether calls of F.scaled_dot_product_attention reach the dispatcher, in which mode, and why not."""
    if env.is_disabled() and not bindings.enabled():  # a later enable() overrides the variable
        return {"installed": False, "enabled": False, "why": f"{env.ENABLED.name}={env.ENABLED.get()}"}
    from ..torch_hooks import sdpa_composite

    stub, composite = bindings.installed(bindings.CUDA_SLOT), sdpa_composite.installed()
    why = (
        ""
        if stub or composite
        else "a CPU build of torch: there are no CUDA calls to dispatch"
        if torch.version.cuda is None
        else bindings.last_error()
    )
    return {
        "installed": stub,
        "composite_hook": composite,
        "enabled": bindings.enabled(),
        "mode": bindings.backend_of(bindings.effective_mode()),
        "why": why,
    }


def kept_by_others() -> dict[str, str]:
    """Return the torch ops with kernels of a third library instead of torch_flashplug kernels.

    Returns:
        For each such op, where the third library registered the kernels.
    """
    from ..torch_hooks import flash_attention_op, stock_workarounds, varlen_attn

    owners = {"varlen_attn": varlen_attn.other_owner()}
    owners["flash attention"] = flash_attention_op.other_owner()
    owners |= {f"F.sdpa's {backend} attention": place for backend, place in stock_workarounds.other_owners().items()}
    return {name: place for name, place in owners.items() if place}


def collect() -> dict[str, object]:
    """Return the whole inventory as plain data, for `info --json`."""
    return {
        "torch_flashplug": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "packages": {"CuTe DSL": dsl.version()} | {package: _version(package) for package in PACKAGES},
        "c_compiler": linker.c_compiler(),
        "devices": _devices(),
        "hook": hook(),
        "kept_by_others": kept_by_others(),
        "packs": packs(),
        "cache": _cache(),
        "environment": {
            flag.name: {"value": flag.get(), "default": flag.default, "help": flag.help} for flag in env.FLAGS
        },
    }


def _describe_pack(pack: dict[str, object]) -> str:
    text = f"{pack['symbols']} kernels, {pack['bytes'] / 1e6:.1f} MB"
    if pack["unusable"]:
        return f"{text}; not used: {pack['unusable']}"
    if pack["compressed"]:
        return f"{text}; unpacked: {pack['unpacked'] or 'at first use'}"
    return text


def _lines(facts: dict[str, object]) -> list[tuple[str, str]]:
    lines = [(name, str(facts[name] or "-")) for name in ("torch_flashplug", "torch", "cuda", "cudnn")]
    lines += [(name, version or "not installed") for name, version in facts["packages"].items()]
    lines.append(("C compiler", facts["c_compiler"] or "not installed"))
    for device in facts["devices"] or ["none"]:
        lines.append(
            (
                "device",
                device if isinstance(device, str) else ", ".join(f"{key} {value}" for key, value in device.items()),
            )
        )
    lines.append(("hook", ", ".join(f"{key} {value}" for key, value in facts["hook"].items() if value != "")))
    lines += [("not ours", f"{op}: kernels registered at {place}") for op, place in facts["kept_by_others"].items()]
    for pack in facts["packs"]:
        lines.append(("kernel pack", f"{pack['path']}: {_describe_pack(pack)}"))
    if not facts["packs"]:
        lines.append(("kernel pack", "none: kernels come from the cache, or are compiled at first use"))
    kept = facts["cache"]
    for name, folder in (("cache", kept), ("cache, fallback", kept["fallback"])):
        if folder:
            text = folder["problem"] or f"{folder['kernels']} kernels, {folder['bytes'] / 1e6:.1f} MB"
            lines.append((name, f"{folder['directory']}: {text}"))
    return lines


def show(facts: dict[str, object]) -> None:
    """Print the facts of collect() as lines of text."""
    for name, text in _lines(facts):
        print(f"{name:<20}{text}")
    print("\nEnvironment")
    for name, flag in facts["environment"].items():
        print(f"{name} = {flag['value'] or '-'} (default {flag['default'] or '-'})\n    {flag['help']}")
