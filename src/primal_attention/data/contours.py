"""Drawing for Pathfinder: smooth dashed contours that keep their distance, and dots, on small gray images.

A contour is a walk of equal steps whose heading turns a little at each; a dash covers the first part of each step. The
rule that makes the task well-posed: lit pixels of one contour's neighbouring dashes are less than `LINK` apart, lit
pixels of different contours are more than that apart. Many images are drawn at once.
"""

from __future__ import annotations

import numpy as np

SIZE = 32
STEP = 2.7  # from dash to dash
DASH = 0.9  # centre line of a dash; its round ends add the half width on either side
HALF_WIDTH = 0.5
DOT_RADIUS = 1.5
TURN = 0.7  # largest turn between dashes, in radians
TRIES = 8  # headings proposed at each step
ATTEMPTS = 12  # walks begun for one contour; a third of it where the image can do without
BORDER = 2.0  # no centre line comes nearer to the edge
MARGIN = 4.2  # between the centre lines of different contours
DOT_EXTRA = 1.05  # more of it for an end that may carry a dot
SELF_MARGIN = 3.6  # between parts of a contour that are not neighbours
LINK = 2.75  # lit pixels (a fifth of full light or more) nearer than this belong to one contour
FINE = 4  # samples per pixel and axis
FAR = 1e3


class Canvas:
    """Contours grown side by side in many images; an image in which one finds no way is dead."""

    def __init__(self, images: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.alive = np.ones(images, dtype=bool)
        self.points = np.zeros((images, 0, 2), dtype=np.float32)  # nodes and middles of finished contours
        self.extra = np.zeros((images, 0), dtype=np.float32)  # what others must keep from each beyond the margin
        self.dashes: list[np.ndarray] = []  # (images, dashes, 2 ends, 2)

    def grow(self, length: int, *, may_carry_dots: bool = False, needed: bool = True) -> np.ndarray:
        """Add one contour of `length` dashes to every living image and return its two ends, (images, 2, 2).

        Where it finds no place the image dies if it is `needed`, else it goes without.
        """
        images = len(self.alive)
        nodes = np.full((images, length + 1, 2), FAR, dtype=np.float32)
        middles = np.full((images, length, 2), FAR, dtype=np.float32)
        end_extra = DOT_EXTRA if may_carry_dots else 0.0
        left = np.flatnonzero(self.alive)
        for _ in range(ATTEMPTS if needed else ATTEMPTS // 3):
            walk, between, found = self._walk(left, length, end_extra)
            nodes[left[found]], middles[left[found]] = walk[found], between[found]
            left = left[~found]
            if len(left) == 0:
                break
        if needed:
            self.alive[left] = False
        self._keep(nodes, middles, end_extra)
        return nodes[:, [0, -1]]

    def _walk(self, rows: np.ndarray, length: int, end_extra: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One walk in each of the images `rows`: its nodes, the middles between them, and whether it found a way."""
        nodes = np.full((len(rows), length + 1, 2), FAR, dtype=np.float32)
        middles = np.full((len(rows), length, 2), FAR, dtype=np.float32)
        nodes[:, 0] = self.rng.uniform(BORDER, SIZE - BORDER, (len(rows), 2))
        heading = self.rng.uniform(0, 2 * np.pi, len(rows)).astype(np.float32)
        going = np.flatnonzero(self._free(rows, nodes[:, :1], end_extra)[:, 0])  # walks that have found a way so far
        for step in range(length):
            last = step == length - 1
            headings = heading[going, None] + self.rng.uniform(-TURN, TURN, (len(going), TRIES)).astype(np.float32)
            direction = np.stack([np.cos(headings), np.sin(headings)], axis=-1)
            # The last dash has no gap behind it: the contour ends where its light ends.
            stride = DASH if last else STEP
            here = nodes[going, step, None]
            ahead, middle = here + stride * direction, here + stride / 2 * direction  # (walks, tries, 2)
            free = self._free(rows[going], ahead, end_extra if last else 0.0)
            if step > 1:
                free &= _apart(ahead, nodes[going, : step - 1], SELF_MARGIN)
            if not last:  # headings that also leave room for the step after come first
                free = free.astype(np.int8) + (free & self._free(rows[going], ahead + STEP * direction, 0.0))
            choice = free.argmax(axis=1)
            row = np.flatnonzero(free[np.arange(len(going)), choice])
            going, choice = going[row], choice[row]
            heading[going] = headings[row, choice]
            nodes[going, step + 1] = ahead[row, choice]
            middles[going, step] = middle[row, choice]
        found = np.zeros(len(rows), dtype=bool)
        found[going] = True
        return nodes, middles, found

    def _free(self, rows: np.ndarray, places: np.ndarray, extra: float) -> np.ndarray:
        """Whether places (rows, tries, 2) are inside and far enough from all finished contours."""
        inside: np.ndarray = np.all((places > BORDER) & (places < SIZE - BORDER), axis=-1)
        if self.points.shape[1] == 0:
            return inside
        return inside & _apart(places, self.points[rows], self.extra[rows][:, None] + np.float32(MARGIN + extra))

    def _keep(self, nodes: np.ndarray, middles: np.ndarray, end_extra: float) -> None:
        points = np.concatenate([nodes, middles], axis=1)
        extra = np.zeros(points.shape[:2], dtype=np.float32)
        extra[:, [0, nodes.shape[1] - 1]] = end_extra
        self.points = np.concatenate([self.points, points], axis=1)
        self.extra = np.concatenate([self.extra, extra], axis=1)
        along = np.diff(nodes, axis=1)
        along *= DASH / np.maximum(np.linalg.norm(along, axis=-1, keepdims=True), 1e-6)
        self.dashes.append(np.stack([nodes[:, :-1], nodes[:, :-1] + along], axis=2))

    def draw(self, rows: np.ndarray, dots: np.ndarray) -> np.ndarray:
        """Gray images (rows, SIZE, SIZE) uint8 of all dashes of the images `rows`, and of dots at (rows, n, 2)."""
        dashes = np.concatenate([part[rows] for part in self.dashes], axis=1)
        part = np.linspace(0, 1, round(DASH * FINE) + 1, dtype=np.float32)[:, None]
        along = dashes[:, :, :1] + part * (dashes[:, :, 1:] - dashes[:, :, :1])  # (rows, dashes, samples, 2)
        light = np.zeros((len(rows), SIZE * FINE, SIZE * FINE), dtype=bool)
        _stamp(light, along.reshape(len(rows), -1, 2), HALF_WIDTH)
        _stamp(light, dots, DOT_RADIUS)
        blocks = light.reshape(len(rows), SIZE, FINE, SIZE, FINE)
        return np.round(blocks.mean(axis=(2, 4), dtype=np.float32) * 255).astype(np.uint8)


def _apart(places: np.ndarray, points: np.ndarray, need: np.ndarray | float) -> np.ndarray:
    """Whether places (rows, m, 2) are further than `need` from every one of points (rows, n, 2)."""
    x = places[:, :, None, 0] - points[:, None, :, 0]
    y = places[:, :, None, 1] - points[:, None, :, 1]
    return (x * x + y * y > np.square(need)).all(axis=-1)


def _stamp(light: np.ndarray, centres: np.ndarray, radius: float) -> None:
    """Discs of `radius` pixels at centres (images, n, 2); centres that lie far away draw nothing."""
    reach = round(radius * FINE)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disc = np.stack([y, x], axis=-1)[np.hypot(y, x) <= radius * FINE]  # (cells, 2)
    cells = np.floor(centres * FINE).astype(np.int32)[:, :, None] + disc  # (images, n, cells, 2)
    image = np.broadcast_to(np.arange(len(light))[:, None, None], cells.shape[:3])
    inside = ((cells >= 0) & (cells < SIZE * FINE)).all(axis=-1)
    light[image[inside], cells[inside][:, 0], cells[inside][:, 1]] = True
