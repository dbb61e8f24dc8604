"""Benchmarks: layers (`attention.py`), generation (`generate.py`) and models (`model.py`, `lra.py`).

`measurement.py` holds what they share: timing, memory, the JSON report, its table and its plot.
"""
