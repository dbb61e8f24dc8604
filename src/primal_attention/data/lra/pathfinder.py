"""Pathfinder (Linsley et al., 2018; Long-Range Arena): are two dots on a 32×32 image the ends of one dashed contour?

    write("data/pathfinder", seed=0)          # imgs/0/sample_0.png …, metadata/0.npy …, as the images are released
    data = load("data/pathfinder")

Every image has two long contours and some short ones that distract. The dots are at both ends of one long contour
(label 1), or at an end of each (label 0). Read row by row, an image is a sequence of 1024 gray levels. The images are
this library's own drawing of the task, not the released ones: accuracies compare within one set only.

A contour is a walk of equal steps whose heading turns a little at each; a dash covers the first part of each step. Lit
pixels of neighbouring dashes of one contour are less than 2.75 pixels apart, lit pixels of different contours further.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from primal_attention.data.lra.tokens import Progress, TokenData, select_rows
from primal_attention.data.storage import Arrays, cached, generated_set
from primal_attention.utils.errors import DataError, import_package
from primal_attention.utils.files import COUNT, read_json, read_text

SIZE = 32
STEP = 2.7  # from dash to dash
DASH = 0.9  # centre line of a dash; its round ends add the half width on either side
HALF_WIDTH = 0.5
DOT_RADIUS = 1.5
MAX_TURN = 0.7  # between dashes, in radians
HEADINGS = 8  # proposed at each step
ATTEMPTS = 12  # walks begun for a long contour; a third of it for a short one
BORDER = 2.0  # least distance of a centre line from the edge
MARGIN = 4.2  # between the centre lines of different contours
DOT_MARGIN = 1.05  # added for an end that may carry a dot
SELF_MARGIN = 3.6  # between parts of a contour that are not neighbours
SUBPIXELS = 4  # per pixel and axis
OUTSIDE = 1e3  # coordinate of points that are not drawn

SIZES = {"train": 160_000, "valid": 20_000, "test": 20_000}
FOLDER_SIZE = 1000  # images per folder, as released
DRAWN_AT_ONCE = 512
CONTOUR_LENGTH = 14  # dashes of a long contour, as in Long-Range Arena
DISTRACTORS = 5  # short contours
MAX_DIFFERENCE = 1.5  # pixels by which the distance between the dots may differ between the labels of one image


class Canvas:
    """Contours drawn side by side in many images. `valid` is False for an image that a long contour does not fit."""

    def __init__(self, images: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.valid = np.ones(images, dtype=bool)
        self.points = np.zeros((images, 0, 2), dtype=np.float32)  # nodes and middles of finished contours
        self.margins = np.zeros((images, 0), dtype=np.float32)  # minimum distance from each, beyond MARGIN
        self.dashes: list[np.ndarray] = []  # (images, dashes, 2 ends, 2)

    def add_contour(self, length: int, *, is_long: bool) -> np.ndarray:
        """Add a contour of `length` dashes to every valid image; return its two ends, (images, 2, 2).

        Where it does not fit, a short contour is left out; without a long one the image becomes invalid.
        """
        points = np.full((len(self.valid), 2 * length + 1, 2), OUTSIDE, dtype=np.float32)  # nodes and middles in turn
        end_margin = DOT_MARGIN if is_long else 0.0
        missing = np.flatnonzero(self.valid)
        for _ in range(ATTEMPTS if is_long else ATTEMPTS // 3):
            walk, fits = self._walk(missing, length, end_margin)
            points[missing[fits]] = walk[fits]
            missing = missing[~fits]
            if len(missing) == 0:
                break
        if is_long:
            self.valid[missing] = False
        margins = np.zeros(points.shape[:2], dtype=np.float32)
        margins[:, [0, -1]] = end_margin
        self.points = np.concatenate([self.points, points], axis=1)
        self.margins = np.concatenate([self.margins, margins], axis=1)
        nodes = points[:, ::2]
        along = np.diff(nodes, axis=1)
        along *= DASH / np.maximum(np.linalg.norm(along, axis=-1, keepdims=True), 1e-6)
        self.dashes.append(np.stack([nodes[:, :-1], nodes[:, :-1] + along], axis=2))
        return nodes[:, [0, -1]]

    def _walk(self, rows: np.ndarray, length: int, end_margin: float) -> tuple[np.ndarray, np.ndarray]:
        """Walk in each of the images `rows`; return the nodes and their middles, and which walks are complete."""
        points = np.full((len(rows), 2 * length + 1, 2), OUTSIDE, dtype=np.float32)
        nodes, middles = points[:, ::2], points[:, 1::2]
        nodes[:, 0] = self.rng.uniform(BORDER, SIZE - BORDER, (len(rows), 2))
        heading = self.rng.uniform(0, 2 * np.pi, len(rows)).astype(np.float32)
        going = np.flatnonzero(self._is_free(rows, nodes[:, :1], end_margin)[:, 0])  # walks without a collision so far
        for step in range(length):
            last = step == length - 1
            turns = self.rng.uniform(-MAX_TURN, MAX_TURN, (len(going), HEADINGS)).astype(np.float32)
            headings = heading[going, None] + turns
            direction = np.stack([np.cos(headings), np.sin(headings)], axis=-1)
            # The last dash has no gap after it: the contour ends with the dash.
            stride = DASH if last else STEP
            here = nodes[going, step, None]
            ahead, middle = here + stride * direction, here + stride / 2 * direction  # (walks, headings, 2)
            free = self._is_free(rows[going], ahead, end_margin if last else 0.0)
            if step > 1:
                free &= _is_far(ahead, nodes[going, : step - 1], SELF_MARGIN)
            if not last:  # prefer headings that also allow the next step
                free = free.astype(np.int8) + (free & self._is_free(rows[going], ahead + STEP * direction, 0.0))
            choice = free.argmax(axis=1)
            row = np.flatnonzero(free[np.arange(len(going)), choice])
            going, choice = going[row], choice[row]
            heading[going] = headings[row, choice]
            nodes[going, step + 1] = ahead[row, choice]
            middles[going, step] = middle[row, choice]
        return points, np.isin(np.arange(len(rows)), going)

    def _is_free(self, rows: np.ndarray, places: np.ndarray, margin: float) -> np.ndarray:
        """Return whether places (rows, n, 2) are inside and far enough from all finished contours."""
        inside: np.ndarray = np.all((places > BORDER) & (places < SIZE - BORDER), axis=-1)
        if self.points.shape[1] == 0:
            return inside
        return inside & _is_far(places, self.points[rows], self.margins[rows][:, None] + np.float32(MARGIN + margin))

    def draw(self, rows: np.ndarray, dots: np.ndarray) -> np.ndarray:
        """Draw all dashes of the images `rows`, and dots at (rows, n, 2): gray images (rows, SIZE, SIZE) uint8."""
        dashes = np.concatenate([part[rows] for part in self.dashes], axis=1)
        part = np.linspace(0, 1, round(DASH * SUBPIXELS) + 1, dtype=np.float32)[:, None]
        along = dashes[:, :, :1] + part * (dashes[:, :, 1:] - dashes[:, :, :1])  # (rows, dashes, points, 2)
        light = np.zeros((len(rows), SIZE * SUBPIXELS, SIZE * SUBPIXELS), dtype=bool)
        _draw_discs(light, along.reshape(len(rows), -1, 2), HALF_WIDTH)
        _draw_discs(light, dots, DOT_RADIUS)
        blocks = light.reshape(len(rows), SIZE, SUBPIXELS, SIZE, SUBPIXELS)
        return np.round(blocks.mean(axis=(2, 4), dtype=np.float32) * 255).astype(np.uint8)


def _is_far(places: np.ndarray, points: np.ndarray, distance: np.ndarray | float) -> np.ndarray:
    """Return whether places (rows, m, 2) are further than `distance` from every one of points (rows, n, 2)."""
    x = places[:, :, None, 0] - points[:, None, :, 0]
    y = places[:, :, None, 1] - points[:, None, :, 1]
    return (x * x + y * y > np.square(distance)).all(axis=-1)


def _draw_discs(light: np.ndarray, centres: np.ndarray, radius: float) -> None:
    """Draw discs of `radius` pixels at centres (images, n, 2); those outside the image draw nothing."""
    reach = round(radius * SUBPIXELS)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disc = np.stack([y, x], axis=-1)[np.hypot(y, x) <= radius * SUBPIXELS]  # (cells, 2)
    cells = np.floor(centres * SUBPIXELS).astype(np.int32)[:, :, None] + disc  # (images, n, cells, 2)
    image = np.broadcast_to(np.arange(len(light))[:, None, None], cells.shape[:3])
    inside = ((cells >= 0) & (cells < SIZE * SUBPIXELS)).all(axis=-1)
    light[image[inside], cells[inside][:, 0], cells[inside][:, 1]] = True


def generate(samples: int, seed: int, progress: Progress = lambda samples: None) -> Arrays:
    """Return images (samples, 32, 32) uint8 and labels (samples,) uint8; of images 2i and 2i + 1, one has label 1."""
    first = np.random.default_rng([seed, 1]).integers(0, 2, -(-samples // 2))
    labels = np.stack([first, 1 - first], axis=1).ravel()[:samples].astype(np.uint8)
    images = np.zeros((samples, SIZE, SIZE), dtype=np.uint8)
    done = batch = 0
    while done < samples:
        by_label = _draw_batch(seed, batch)
        batch_labels = labels[done : done + by_label.shape[1]]
        images[done : done + len(batch_labels)] = by_label[batch_labels, np.arange(len(batch_labels))]
        done, batch = done + len(batch_labels), batch + 1
        progress(len(batch_labels))
    return {"images": images, "labels": labels}


def _draw_batch(seed: int, number: int) -> np.ndarray:
    """Draw a batch of images, with the dots of label 0 and of label 1, (2, images, …)."""
    canvas = Canvas(DRAWN_AT_ONCE, np.random.default_rng([seed, 2, number]))
    ends = np.stack([canvas.add_contour(CONTOUR_LENGTH, is_long=True) for _ in range(2)], axis=1)
    for _ in range(DISTRACTORS):
        canvas.add_contour(CONTOUR_LENGTH // 3, is_long=False)
    dots, usable = _place_dots(ends, canvas.rng)
    rows = np.flatnonzero(canvas.valid & usable)
    return np.stack([canvas.draw(rows, dots[rows, label]) for label in range(2)])


def _place_dots(ends: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return places of two dots for either label, (images, 2 labels, 2 dots, 2), and whether the image is usable.

    The ends of one contour are further apart than ends of two, so the distance alone would predict the label. An image
    is used, for either label, only where a pair of each kind has nearly the same distance.
    """
    flat = ends.reshape(len(ends), 4, 2)  # ends 0 and 1 of one contour, 2 and 3 of the other
    separate = np.array([(0, 2), (0, 3), (1, 2), (1, 3)])
    joined = np.array([(0, 1), (2, 3)])

    def distances(pairs: np.ndarray) -> np.ndarray:
        return np.linalg.norm(flat[:, pairs[:, 0]] - flat[:, pairs[:, 1]], axis=-1)  # (images, pairs)

    difference = np.abs(distances(separate)[:, :, None] - distances(joined)[:, None]).reshape(len(ends), -1)
    similar = difference < MAX_DIFFERENCE
    choice = np.where(similar, rng.random(similar.shape), -1.0).argmax(axis=1)
    row = np.arange(len(ends))[:, None]
    places = np.stack([flat[row, separate[choice // len(joined)]], flat[row, joined[choice % len(joined)]]], axis=1)
    return places, similar.any(axis=1)


def write(
    folder: str | Path,
    sizes: Mapping[str, int] = SIZES,
    *,
    seed: int = 0,
    progress: Progress = lambda samples: None,
) -> Path:
    """Write images and metadata in the released layout, and splits.json with the sizes of train, valid and test.

    An interruption leaves no set.
    """
    pillow = import_package("PIL.Image", "writing PNG files")
    with generated_set(Path(folder)) as place:
        arrays = generate(sum(sizes.values()), seed, progress)
        (place / "metadata").mkdir()
        for number, start in enumerate(range(0, len(arrays["labels"]), FOLDER_SIZE)):
            images, labels = (arrays[key][start : start + FOLDER_SIZE] for key in ("images", "labels"))
            home = place / "imgs" / str(number)
            home.mkdir(parents=True)
            for i, image in enumerate(images):
                pillow.fromarray(image).save(home / f"sample_{i}.png")
            lines = "".join(f"imgs/{number} sample_{i}.png {i} {label}\n" for i, label in enumerate(labels))
            (place / "metadata" / f"{number}.npy").write_bytes(lines.encode())
        (place / "splits.json").write_bytes(f"{json.dumps(dict(sizes))}\n".encode())
    return Path(folder)


def load(folder: str | Path) -> TokenData:
    """Read a folder with imgs/ and metadata/, or the released archive, which has one such for contours of 14 dashes.

    Without a splits.json, 80 % are for training, 10 % for validation and 10 % for test, drawn with a fixed seed.
    """
    folder = Path(folder)
    inner = folder / f"curv_contour_length_{CONTOUR_LENGTH}"
    folder = inner if inner.is_dir() else folder
    metadata = [file for file in (folder / "metadata").glob("*.npy") if file.stem.isdecimal()]
    metadata.sort(key=lambda file: int(file.stem))
    if not metadata:
        raise DataError(
            f"{folder}: no metadata/*.npy and so no images; 'primal data pathfinder --out {folder}' draws some"
        )
    images = [os.path.join(place, name) for place, _, names in os.walk(folder / "imgs") for name in names]
    arrays = cached(folder, "images", [*metadata, *sorted(images)], None, partial(_read_images, folder, metadata))
    tokens = {"tokens": arrays["images"].reshape(len(arrays["images"]), -1), "labels": arrays["labels"]}
    splits = {name: select_rows(tokens, rows) for name, rows in _split_rows(folder, len(tokens["labels"])).items()}
    return TokenData("pathfinder", **splits, vocabulary=256, classes=2, padded=False)


def _split_rows(folder: Path, samples: int) -> dict[str, np.ndarray | slice]:
    file = folder / "splits.json"
    if not file.exists():
        if samples < 10:
            raise DataError(f"{folder}: {samples} images are too few to split off validation and test")
        order = np.random.default_rng(0).permutation(samples)
        parts = np.split(order, (samples * 8 // 10, samples * 9 // 10))
        return {name: np.sort(part) for name, part in zip(SIZES, parts, strict=True)}
    content = read_json(file, dict.fromkeys(SIZES, COUNT))
    sizes = [content[name] for name in SIZES]
    if sum(sizes) != samples:
        raise DataError(f"{file}: train, valid and test must have the sum {samples} (got {sum(sizes)})")
    ends = np.cumsum(sizes)
    return {name: slice(end - size, end) for name, size, end in zip(SIZES, sizes, ends, strict=True)}


def _read_images(folder: Path, metadata: list[Path]) -> Arrays:
    """Return all images that the metadata lists, in their order."""
    pillow = import_package("PIL.Image", "reading PNG files")
    images, labels = [], []
    lines = ((file, number, line) for file in metadata for number, line in enumerate(read_text(file).splitlines(), 1))
    for file, number, line in lines:
        words = line.split()
        if len(words) < 4 or words[3] not in ("0", "1"):
            raise DataError(f"{file}, line {number}: expected folder, file, number and label 0 or 1")
        place = folder / words[0] / words[1]
        try:
            with pillow.open(io.BytesIO(place.read_bytes())) as image:
                pixels = np.asarray(image.convert("L"))
        except Exception as error:  # Pillow's decoders raise almost any type for damaged files
            reason = "is missing" if isinstance(error, FileNotFoundError) else "is no image"
            raise DataError(f"{place} {reason}, though {file.name}, line {number}, lists it") from None
        if pixels.shape != (SIZE, SIZE):
            raise DataError(f"{place}: {pixels.shape[1]}×{pixels.shape[0]} pixels where {SIZE}×{SIZE} are needed")
        images.append(pixels)
        labels.append(int(words[3]))
    if not images:
        raise DataError(f"{folder}: the metadata lists no images")
    return {"images": np.stack(images), "labels": np.array(labels, dtype=np.uint8)}
