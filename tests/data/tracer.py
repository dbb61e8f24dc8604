"""Follow dashed lines by eye: a tracer of Pathfinder images that knows nothing of how they were drawn.

Dots are the two brightest 3×3 patches. From one dot, light spreads to every lit pixel at most a short jump away.
"""

from __future__ import annotations

import numpy as np

LIT = 48  # a fifth of full light
JUMP = 2.75  # the gap between two dashes, from pixel centre to pixel centre, and no more


def find_dots(image: np.ndarray) -> list[tuple[int, int]]:
    padded = np.pad(image.astype(int), 1)
    height, width = image.shape
    patch = sum(padded[y : y + height, x : x + width] for y in range(3) for x in range(3))
    dots = []
    for _ in range(2):
        y, x = np.unravel_index(patch.argmax(), patch.shape)
        dots.append((int(y), int(x)))
        patch[max(0, y - 3) : y + 4, max(0, x - 3) : x + 4] = 0
    return dots


def connected(image: np.ndarray) -> bool:
    """Whether the dots lie on one dashed line."""
    start, goal = find_dots(image)
    lit = np.argwhere(image >= LIT)
    near = np.hypot(*(lit[:, None] - lit).transpose(2, 0, 1)) < JUMP
    reached = (lit == start).all(axis=1)
    assert reached.any(), "a dot must be lit"
    while True:
        wider = near[reached].any(axis=0)
        if (wider == reached).all():
            break
        reached = wider
    return bool(reached[(lit == goal).all(axis=1)].any())
