"""Old public names that keep working for one release, each with a DeprecationWarning."""

from __future__ import annotations

import warnings

OLD_NAMES = {
    "BlockLists": "PreparedBlockMask",
    "LengthsPlan": "VarlenPlan",
    "block_lists": "prepare_block_mask",
    "plan": "plan_varlen",
}


def warn_renamed(old: str, new: str) -> None:
    """Issue the warning about an old name, at the line of the program that uses the name."""
    warnings.warn(f"{old} is deprecated. Use {new}.", DeprecationWarning, stacklevel=3)


def renamed_attribute(owner: str, old: str, new: str) -> property:
    """Return a property that reads the attribute `new` under the name `old`."""

    def read(instance: object) -> object:
        warn_renamed(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(instance, new)

    return property(read, doc=f"Deprecated name of `{new}`.")
