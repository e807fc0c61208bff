"""docs/api.md: each public name has a section with its signature, all arguments, and an example.

test_readme runs the examples.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import ForwardRef

import pytest

import torch_flashplug
from torch_flashplug import __main__, flash_attn

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
PUBLIC = {name: getattr(torch_flashplug, name) for name in torch_flashplug.__all__}
PUBLIC |= {name: getattr(flash_attn, name) for name in flash_attn.__all__}


def annotation_of(note: object) -> str:
    if isinstance(note, ForwardRef):
        return note.__forward_arg__
    return note if isinstance(note, str) else inspect.formatannotation(note)


def parts_of(thing: object) -> tuple[list[str], str]:
    """Return the parameters of a signature as text, and the return annotation as text."""
    signature, parameters, by_name = inspect.signature(thing), [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not by_name:
            parameters.append("*")
            by_name = True
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parameters.append(f"{stars}{parameter.name}: {annotation_of(parameter.annotation)}{default}")
    returned = "" if inspect.isclass(thing) else f" -> {annotation_of(signature.return_annotation)}"
    return parameters, returned


def section_of(name: str) -> str:
    sections = re.findall(rf"^### `{name}`\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
    assert len(sections) == 1
    return sections[0]


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section, re.S)


def without_spaces(text: str) -> str:
    return re.sub(r"\s+", "", text).replace(",)", ")")


def test_sections_of_the_page_are_the_public_names() -> None:
    assert set(re.findall(r"^### `(\w+)`$", PAGE, re.M)) == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_signatures_on_the_page_equal_the_code(name: str) -> None:
    parameters, returned = parts_of(PUBLIC[name])
    (shown,) = blocks(section_of(name), "text")

    assert without_spaces(shown) == without_spaces(f"{name}({', '.join(parameters)}){returned}")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_section_names_all_arguments_results_and_errors(name: str) -> None:
    section = section_of(name)
    rows = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))

    assert not [parameter for parameter in inspect.signature(PUBLIC[name]).parameters if f"`{parameter}`" not in rows]
    assert "Returns: " in section and "Raises: " in section


@pytest.mark.parametrize("name", PUBLIC)
def test_a_section_has_an_example(name: str) -> None:
    assert any(name in example for example in blocks(section_of(name), "python"))


def test_fields_of_plans_are_on_the_page() -> None:
    assert not [name for name in torch_flashplug.api.backend.Plan.__dataclass_fields__ if f"`{name}`" not in PAGE]


def test_verbs_and_options_of_explain_are_on_the_page() -> None:
    (verbs,) = (action.choices for action in __main__._parser()._actions if action.dest == "verb")
    options = [option for action in verbs["explain"]._actions for option in action.option_strings]

    assert not [verb for verb in verbs if f"| `{verb}` |" not in PAGE]
    assert not [option for option in options if option not in ("-h", "--help") and f"`{option}`" not in PAGE]


def test_unsupported_flash_attn_arguments_are_on_the_page() -> None:
    section = PAGE.split("\n## flash_attn names\n", 1)[1].split("\n### ", 1)[0]

    assert not [name for name in {*flash_attn._NO_EFFECT, *flash_attn._REMEDIES} if f"`{name}`" not in section]
