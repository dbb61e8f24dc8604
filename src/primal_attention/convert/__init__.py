"""Other people's models: Primal-Attention in their attention's place, and a look at the attention they have."""

from __future__ import annotations

from .replace import Primalized, primalize
from .report import Report
from .saved import load_primalized

__all__ = ["Primalized", "Report", "load_primalized", "primalize"]
