"""Benchmarks: layers (`attention.py`), generation (`generate.py`), models (`model.py`, `lra.py`), and `classifiers.py`.

`measurement.py` holds what they share: timing, memory, the JSON report, its table and its plot.
"""
