"""Soft caps: a score becomes cap * tanh(score / cap) ahead of the mask (Gemma 2, arXiv 2408.00118). A stage of the
scores: they are tanh of what they were, and the softmax's scale is the cap.

tanh.approx is good to 2^-11 of its value. Its derivative, 1 - tanh^2, is made of P where dS is: tanh = (log2 P + LSE) /
cap, all in powers of two, so that the backward keeps no register for it. Where P has 16 bits there (dK of a
backward in parts), it is good to 2^-8 / cap.
"""

from __future__ import annotations

from ..score_stages.pipeline import Chain
from ..score_stages.softcap import Softcap
from .base import Seams


class Softcapped(Seams):
    bent = True

    def chain(self, call: object) -> Chain:
        """Ahead of what hides scores."""
        return Chain((Softcap(call.scales.natural / call.softcap, call.softcap), *super().chain(call).stages))
