"""Float masks: a bias is added to the scores, whatever block it is of."""

from __future__ import annotations

from ..score_stages.bias import Bias as Added
from ..score_stages.pipeline import Chain
from .base import Seams


class Bias(Seams):
    def chain(self, call: object) -> Chain:
        """First of all: what follows hides scores that may have been negated before."""
        return Chain((Added(call.bias, call.scales.natural), *super().chain(call).stages))
