"""A small set in the ImageFolder layout: three classes told apart by colour."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"n01": (200, 40, 40), "n02": (40, 200, 40), "n03": (40, 40, 200)}


def write(folder: Path, train: int = 10, val: int = 4) -> Path:
    """JPEG files of unequal shapes; sides from 36 to 60 pixels."""
    rng = np.random.default_rng(0)
    for half, count in (("train", train), ("val", val)):
        for name, colour in COLOURS.items():
            place = folder / half / name
            place.mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(-40, 40, (*rng.integers(36, 60, 2), 3))
                pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.jpg")
    return folder


def spoil(file: Path) -> Path:
    """Cut a file in the middle, so that it does not decode."""
    file.write_bytes(file.read_bytes()[:100])
    return file
