"""Benchmarks behind `primal bench`: layers (`attention.py`), decoding (`decode.py`) and models (`model.py`, `lra.py`).

`measurement.py` holds what they share: timing, memory, the JSON report, its table and its plot.
"""
