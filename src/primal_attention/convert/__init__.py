"""Models of other libraries: replace their attention, train the replacement, look at attention matrices."""

from __future__ import annotations

from .replace import Primalized, Report, load_primalized, primalize

__all__ = ["Primalized", "Report", "load_primalized", "primalize"]
