"""`import primal_attention` costs next to nothing beyond `import torch`."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("sklearn", "scipy", "lightning", "pytorch_lightning", "matplotlib", "aeon", "pandas", "transformers", "triton")

LOADED = """
import sys, torch, numpy
before = set(sys.modules)
import primal_attention
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""

TIMED = """
import time, torch, numpy
start = time.perf_counter()
import primal_attention
print(time.perf_counter() - start)
"""


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_nothing_heavy_is_imported() -> None:
    new = set(run(LOADED).split())
    assert "primal_attention" in new
    assert not new & set(HEAVY)


def test_it_takes_at_most_three_tenths_of_a_second() -> None:
    # The best of a few: a busy machine can only make it slower.
    assert min(float(run(TIMED)) for _ in range(3)) <= 0.3


def test_an_unknown_name_is_an_attribute_error() -> None:
    import primal_attention

    assert "PrimalAttention" in dir(primal_attention)
    assert not hasattr(primal_attention, "NoSuchThing")
