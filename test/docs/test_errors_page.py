"""docs/errors.md: each message on the page exists in the sources, and messages that users meet are on the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from torch_flashplug.registry import features

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_flashplug"
PAGE = (ROOT / "docs" / "errors.md").read_text()
MESSAGES = re.findall(r"^- `([^`]+)`:", PAGE, re.M)
MAX_CHARS_BETWEEN = 300  # characters of C++ between two parts of one message
# Modules whose errors users meet; every raised message must be on the page.
RAISING = (
    *("api/attention", "api/attention_args", "api/varlen", "api/varlen_args", "api/varlen_plan", "api/kv_cache"),
    *("api/quantize_kv", "ops/quantize_ahead"),
    *("api/block_sparse", "api/backend", "api/explain_attention", "api/explain_varlen", "flash_attn", "env"),
    *("ops/block_mask", "ops/quantized_kv", "ops/attention", "ops/paged", "ops/sdpa", "registry/quant_recipes"),
    *("dispatch/library", "cli/warmup", "cli/model_config"),
    *("codegen/jit", "codegen/dsl", "codegen/linker", "codegen/kernel_cache", "codegen/worker"),
    *("integrations/int8_cache", "integrations/paged_batch", "integrations/vllm", "integrations/sglang"),
    "torch_hooks/distributed/context_parallel",
    *("torch_hooks/distributed/ring_attention", "torch_hooks/vmap"),
)
# Messages without fixed words, made only of values and of texts listed separately on the page.
WITHOUT_WORDS = {"attention: {}{}", "{}: {} must be {}, but got {}.", "{}: {}", "item assignment: {}"}


def regex_of(message: str) -> str:
    """Return a regular expression for a message of the page; `...` matches anything."""
    return ".*?".join(re.escape(piece) for piece in message.split("..."))


def text_of(node: ast.AST) -> str | None:
    """Return the text of a Python string with {} in place of values, or None for any other node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[\d.]*[sdf]", "{}", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text())


@cache
def python_texts() -> str:
    """Return all strings of the package and the build backend, one per line."""
    trees = [ast.parse(path.read_text()) for path in (*PACKAGE.rglob("*.py"), ROOT / "tools" / "build_backend.py")]
    texts = (text_of(node) for tree in trees for node in ast.walk(tree))
    return "\n".join(line for text in texts if text for line in text.split("\n"))


@cache
def other_texts() -> str:
    """Return the C++ and CMake sources, with string literals joined across lines."""
    files = sorted((ROOT / "src").rglob("*.cpp")) + [ROOT / "CMakeLists.txt"]
    return "\n".join(re.sub(r'"\s*\n\s*"', "", path.read_text()) for path in files)


def is_on_the_page(text: str) -> bool:
    return any(re.search(regex_of(message), text, re.DOTALL) for message in MESSAGES)


def raised_messages() -> Iterator[tuple[str, str]]:
    """Yield the module and the text of each raised error that has fixed words."""
    for module in RAISING:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = text_of(node.exc.args[0])
                if text is not None and text not in WITHOUT_WORDS:
                    yield module, text


def returned_texts(module: str, *functions: str) -> Iterator[str]:
    """Yield the texts returned by functions of a module."""
    for function in ast.walk(tree_of(module)):
        if isinstance(function, ast.FunctionDef) and function.name in functions:
            texts = (text_of(node.value) for node in ast.walk(function) if isinstance(node, ast.Return) and node.value)
            yield from filter(None, texts)


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 150
    assert len(MESSAGES) == len(re.findall(r"^- `", PAGE, re.M))


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_the_page_occur_in_the_sources(message: str) -> None:
    between = regex_of(message).replace(".*?", f".{{0,{MAX_CHARS_BETWEEN}}}?")

    assert re.search(regex_of(message), python_texts()) or re.search(between, other_texts(), re.DOTALL)


def test_errors_raised_by_python_are_on_the_page() -> None:
    texts = list(raised_messages())

    assert len(texts) > 80
    assert not [(module, text) for module, text in texts if not is_on_the_page(text)]


def test_reasons_of_the_dispatcher_are_on_the_page() -> None:
    source = re.sub(r'"\s*\n\s*"', "", (ROOT / "src" / "dispatch" / "explain.cpp").read_text())
    cases = re.findall(r"case Why::(k\w+):\n(.*?)(?=\n    case Why|\n  \}\n)", source, re.DOTALL)
    spoken = {name: code for name, code in cases if '"' in code}

    assert len(spoken) > 20
    assert not [name for name, code in spoken.items() if not is_on_the_page(code)]
    assert not [feature.name for feature in features.FEATURES if not is_on_the_page(feature.unsupported_reason)]


def test_reasons_of_calls_outside_the_dispatcher_are_on_the_page() -> None:
    texts = list(returned_texts("torch_hooks/describe_call", "outside_dispatcher", "misfit", "shape_obstacle"))

    assert len(texts) > 12
    with_ending = "{}; stock attention decides"  # a reason of misfit() or shape_obstacle() with an ending
    assert not [text for text in texts if text != with_ending and not is_on_the_page(text)]


def test_reasons_for_missing_kernels_are_on_the_page() -> None:
    calls = [node for node in ast.walk(tree_of("codegen/jit")) if isinstance(node, ast.Call)]
    whys = [text_of(word.value) for call in calls for word in call.keywords if word.arg == "why"]

    assert not [why for why in whys if why not in (None, "interrupted") and not is_on_the_page(why)]
