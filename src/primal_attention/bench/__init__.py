"""Benchmarks behind `primal bench`: layers (`attention.py`) and whole models (`model.py`, `lra.py`).

`measurement.py` holds what they share: timing, memory, the JSON report, its table and its plot.
"""
