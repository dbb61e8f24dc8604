"""Models of other libraries: replace their attention, train the replacement, compute singular values of attention."""

from __future__ import annotations

from .replace import Primalized, Report, load_primalized, primalize

__all__ = ["Primalized", "Report", "load_primalized", "primalize"]
