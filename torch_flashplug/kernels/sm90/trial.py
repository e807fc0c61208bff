"""Compile-time switches of the 8-bit forward, read from the environment: for one measurement, then deleted."""

from __future__ import annotations

import os

FLAGS = frozenset(filter(None, os.environ.get("FLASHPLUG_EIGHT", "").split(",")))
