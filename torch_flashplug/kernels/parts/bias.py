"""Float masks: a bias is added to the scores, whatever block it is of."""

from __future__ import annotations

from .scores.bias import Bias as Added
from .scores.chain import Chain
from .seams import Seams


class Bias(Seams):
    def chain(self, call: object) -> Chain:
        """First of all: what follows hides scores that may have been negated before."""
        return Chain((Added(call.bias, call.scales.natural), *super().chain(call).stages))
