"""Old public names: each works for one release, and warns with the new name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_flashplug
from torch_flashplug.api.backend import Plan
from torch_flashplug.deprecation import OLD_NAMES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_old_name_is_the_object_of_the_new_name(old: str, new: str) -> None:
    message = f"torch_flashplug.{old} is deprecated. Use torch_flashplug.{new}."
    with pytest.warns(DeprecationWarning, match=message) as warned:
        value = getattr(torch_flashplug, old)

    assert value is getattr(torch_flashplug, new)
    assert warned[0].filename == __file__


def test_old_names_are_not_exported() -> None:
    assert not set(OLD_NAMES) & {*torch_flashplug.__all__, *dir(torch_flashplug)}
    assert set(OLD_NAMES.values()) <= set(torch_flashplug.__all__)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torch_flashplug' has no attribute 'no_such_name'"):
        torch_flashplug.no_such_name  # noqa: B018


def test_old_attributes_read_the_new_attributes() -> None:
    mask = torch_flashplug.PreparedBlockMask(torch.zeros(1, 1, 1), 1, 1, False, 1.5)
    lengths_plan = torch_flashplug.VarlenPlan(None, 0, 1, 1, None, (None,), (None,))
    plan = Plan("call", "stock", why_not_8bit="No measured entry covers this call.")

    with pytest.warns(DeprecationWarning, match="Use PreparedBlockMask.metadata."):
        assert mask.digest is mask.metadata
    with pytest.warns(DeprecationWarning, match="Use PreparedBlockMask.cost_ratio_192."):
        assert mask.tall == 1.5
    with pytest.warns(DeprecationWarning, match="Use VarlenPlan.versions."):
        assert lengths_plan.seen_as == (None,)
    with pytest.warns(DeprecationWarning, match="Plan.whole is deprecated. Use Plan.why_not_8bit."):
        assert plan.whole == plan.why_not_8bit
    with pytest.warns(DeprecationWarning, match="Plan.rescue is deprecated. Use Plan.stock_bug."):
        assert plan.rescue == plan.stock_bug


def test_changelog_names_each_old_name() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()

    assert not [(old, new) for old, new in OLD_NAMES.items() if old not in text or new not in text]
