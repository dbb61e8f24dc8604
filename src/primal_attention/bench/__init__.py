"""Benchmarks of layers (`attention.py`) and of whole models (`model.py`).

`measurement.py` holds what they share: timing, memory, the loop over rows, the JSON report, its table and its plot.
"""
