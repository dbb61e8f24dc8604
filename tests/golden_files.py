"""Arrays of the authors' implementation, for parity tests.

The small files are part of the repository; the larger ones are read from a folder `shared/golden` beside the checkout.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

PLACES = (Path(__file__).parent / "golden", Path(__file__).parents[2] / "shared" / "golden")


def load(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays of a golden file in float64, and its metadata."""
    path = next((place / f"{name}.npz" for place in PLACES if (place / f"{name}.npz").exists()), None)
    if path is None:
        pytest.skip(f"{name}.npz is too large for the repository and shared/golden is not beside the checkout")
    with np.load(path) as file:
        meta = json.loads(str(file["meta"]))
        arrays = {key: torch.from_numpy(file[key]) for key in file.files if key != "meta"}
    return {k: v.double() if v.is_floating_point() else v for k, v in arrays.items()}, meta


def storage_ratio(array: Tensor, meta: dict[str, Any]) -> float:
    """The error of storing: float64 noise, or float32 rounding for the large arrays of large files."""
    rounded = meta["large_golden_stored_as_float32"] and array.numel() > 20_000
    return 6e-8 if rounded else 1e-12
