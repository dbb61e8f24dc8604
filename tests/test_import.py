"""`import primal_attention` resolves its names on first use."""

from __future__ import annotations

import subprocess
import sys

import primal_attention

SCRIPT = """
import sys
import primal_attention
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_import_loads_neither_torch_nor_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "lightning", "scipy"} & set(done.stdout.split())


def test_public_names_resolve() -> None:
    assert set(dir(primal_attention)) == set(primal_attention.__all__)
    assert primal_attention.PrimalAttention(8, 2, rank=2).embed_dim == 8
    assert primal_attention.nn.__name__ == "primal_attention.nn"
    assert not hasattr(primal_attention, "NoSuchThing")
