"""Drawing for Pathfinder: smooth dashed contours that keep their distance, and dots, on small gray images.

A contour is a walk of equal steps whose heading turns a little at each; a dash covers the first part of each step. The
rule that makes the task well-posed: lit pixels of one contour's neighbouring dashes are less than `LINK` apart, lit
pixels of different contours are more than that apart. Many images are drawn at once.

Pathfinder (Linsley et al., 2018; Long-Range Arena): do two dots on a 32×32 image lie on one dashed contour?

Every image has two long contours and some short ones that distract. The dots stand on both ends of one long contour
(label 1), or on an end of each (label 0). Read row by row an image is a sequence of 1024 gray levels.

    write("data/pathfinder", seed=0)          # imgs/0/sample_0.png …, metadata/0.npy …, as the images are released
    data = load("data/pathfinder")

The images are this library's own drawing of the task, not the released ones: accuracies compare within one set only.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.data.lra.tokens import Progress, TokenData, TokenSplit
from primal_attention.data.storage import (
    Arrays,
    cached,
    generated_set,
    read_text,
    reading,
    replacing,
    require_complete,
    write_file,
)
from primal_attention.utils.errors import DataError, import_package

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


SIZES = {"train": 160_000, "valid": 20_000, "test": 20_000}
FOLDER_SIZE = 1000  # images per folder, as released
DRAWN_AT_ONCE = 512
CONTOUR_LENGTH = 14
DISTRACTORS = 5
ALIKE = 1.5  # pixels by which the distances of the dots of the two labels may differ in one image


def generate(
    cases: int,
    seed: int,
    contour_length: int = CONTOUR_LENGTH,
    distractors: int = DISTRACTORS,
    progress: Progress | None = None,
    workers: int = 1,
) -> Arrays:
    """Images (cases, 32, 32) uint8 and labels (cases,) uint8; images 2i and 2i + 1 have one label each.

    The number of processes changes nothing about them.
    """
    _check_settings(contour_length, distractors, workers)
    labels = _labels(cases, seed)
    images = np.zeros((cases, SIZE, SIZE), dtype=np.uint8)
    done = 0
    for more, _, _ in _draw(labels, seed, contour_length, distractors, workers):
        images[done : done + len(more)] = more
        done += len(more)
        if progress is not None:
            progress(len(more))
    return {"images": images, "labels": labels}


def _check_settings(contour_length: int, distractors: int, workers: int) -> None:
    if not 3 <= contour_length <= 18:
        raise DataError(f"contour_length must lie between 3 and 18 to fit a 32×32 image twice (got {contour_length})")
    if distractors < 0:
        raise DataError(f"distractors must not be negative (got {distractors})")
    if workers < 1:
        raise DataError(f"workers must be at least 1 (got {workers})")


def _labels(cases: int, seed: int) -> np.ndarray:
    first = np.random.default_rng([seed, 1]).integers(0, 2, -(-cases // 2))
    return np.stack([first, 1 - first], axis=1).ravel()[:cases].astype(np.uint8)


def _draw(
    labels: np.ndarray,
    seed: int,
    contour_length: int,
    distractors: int,
    workers: int,
    done: int = 0,
    sheet: int = 0,
    used: int = 0,
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Images of the labels from number `done` on, as (images, their sheet, images of this sheet used before them).

    `sheet` and `used` say where to continue: the next image is number `used` of this sheet.
    """
    draw = partial(_drawn, seed, contour_length, distractors)
    with closing(_sheets(draw, workers, sheet)) as sheets:
        while done < len(labels):
            either = next(sheets)[:, used:]
            wanted = labels[done : done + either.shape[1]]
            yield either[wanted, np.arange(len(wanted))], sheet, used
            done, sheet, used = done + len(wanted), sheet + 1, 0


def _sheets(draw: Callable[[int], np.ndarray], workers: int, first: int = 0) -> Generator[np.ndarray, None, None]:
    """Sheets from `first` on, without end, in their order, drawn by so many processes."""
    if workers < 2:
        yield from map(draw, count(first))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        numbers = count(first)
        waiting = deque(pool.submit(draw, number) for number in islice(numbers, 2 * workers))
        try:
            while True:
                waiting.append(pool.submit(draw, next(numbers)))
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _drawn(seed: int, contour_length: int, distractors: int, sheet: int) -> np.ndarray:
    """The images of a sheet that can carry either label, with the dots of label 0 and of label 1, (2, images, …)."""
    canvas, ends = _sheet(np.random.default_rng([seed, 2, sheet]), contour_length, distractors)
    dots, like = _dots(ends, canvas.rng)
    rows = np.flatnonzero(canvas.alive & like)
    return np.stack([canvas.draw(rows, dots[rows, label]) for label in range(2)])


def _sheet(rng: np.random.Generator, contour_length: int, distractors: int) -> tuple[Canvas, np.ndarray]:
    """Contours of many images, and the ends of the two long ones, (images, 2 contours, 2 ends, 2)."""
    canvas = Canvas(DRAWN_AT_ONCE, rng)
    ends = np.stack([canvas.grow(contour_length, may_carry_dots=True) for _ in range(2)], axis=1)
    for _ in range(distractors):
        canvas.grow(max(2, contour_length // 3), needed=False)
    return canvas, ends


def _dots(ends: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Places of the two dots for either label, (images, 2 labels, 2 dots, 2), and whether the two are alike.

    Ends of one contour lie further apart than ends of two, and a model could go by that instead of the path. So an
    image is used, for either label, only where both kinds of pairs come in nearly the same distance.
    """
    flat = ends.reshape(len(ends), 4, 2)  # ends 0 and 1 of one contour, 2 and 3 of the other
    apart = np.array([(0, 2), (0, 3), (1, 2), (1, 3)])
    joined = np.array([(0, 1), (2, 3)])

    def distances(pairs: np.ndarray) -> np.ndarray:
        return np.linalg.norm(flat[:, pairs[:, 0]] - flat[:, pairs[:, 1]], axis=-1)  # (images, pairs)

    unlike = np.abs(distances(apart)[:, :, None] - distances(joined)[:, None]).reshape(len(ends), -1)
    alike = unlike < ALIKE
    choice = np.where(alike, rng.random(alike.shape), -1.0).argmax(axis=1)
    row = np.arange(len(ends))[:, None]
    places = np.stack([flat[row, apart[choice // len(joined)]], flat[row, joined[choice % len(joined)]]], axis=1)
    return places, alike.any(axis=1)


def write(
    folder: str | Path,
    *,
    train: int = SIZES["train"],
    valid: int = SIZES["valid"],
    test: int = SIZES["test"],
    seed: int = 0,
    contour_length: int = CONTOUR_LENGTH,
    distractors: int = DISTRACTORS,
    progress: Progress | None = None,
    workers: int = 1,
) -> Path:
    """Write images and metadata in the released layout, and splits.json, which says where train, valid and test begin.

    After an interruption, a call with the same arguments completes the set. `progress` is called with the number of
    new samples, for every sample twice: when it is drawn and when it is written.
    """
    folder = Path(folder)
    sizes = {"train": train, "valid": valid, "test": test}
    if min(sizes.values()) < 1:
        raise DataError(f"every split needs at least one case (got {', '.join(f'{k} {v}' for k, v in sizes.items())})")
    _check_settings(contour_length, distractors, workers)
    settings = {**sizes, "seed": seed, "contour_length": contour_length, "distractors": distractors}
    with generated_set(folder, "pathfinder", settings, "metadata") as state:
        labels = _labels(sum(sizes.values()), seed)
        images = np.zeros((len(labels), SIZE, SIZE), dtype=np.uint8)
        position = _continue_from(folder, state.position, images, labels)
        written = drawn = position[0]
        if progress is not None:
            progress(2 * written)
        for more, sheet, used in _draw(labels, seed, contour_length, distractors, workers, *position):
            first, drawn = drawn, drawn + len(more)
            images[first:drawn] = more
            if progress is not None:
                progress(len(more))
            while drawn - written >= FOLDER_SIZE or written < drawn == len(labels):
                part = slice(written, min(written + FOLDER_SIZE, len(labels)))
                _write_part(folder, written // FOLDER_SIZE, images[part], labels[part])
                written = part.stop
                state.save({"written": written, "sheet": sheet, "used": used + written - first})
                if progress is not None:
                    progress(part.stop - part.start)
        write_file(folder / "splits.json", lambda out: out.write(f"{json.dumps(sizes)}\n".encode()))
        cached(folder, "images", _sources(folder), None, lambda: {"images": images, "labels": labels})
    return folder


def _write_part(folder: Path, number: int, images: np.ndarray, labels: np.ndarray) -> None:
    """Write one folder of images, then the metadata that lists them."""
    with replacing(folder / "imgs" / str(number)) as place:
        place.mkdir(exist_ok=True)
        for i, image in enumerate(images):
            (place / f"sample_{i}.png").write_bytes(png(image))
    lines = _metadata_lines(number, labels)
    write_file(folder / "metadata" / f"{number}.npy", lambda out: out.write(lines.encode()))


def _metadata_lines(number: int, labels: np.ndarray) -> str:
    return "".join(f"imgs/{number} sample_{i}.png {i} {label}\n" for i, label in enumerate(labels))


def _continue_from(folder: Path, position: object, images: np.ndarray, labels: np.ndarray) -> tuple[int, int, int]:
    """Read the images that an interrupted call has written, and return (written, sheet, used).

    All zero if there are none, or if any of them is not exactly as it was written.
    """
    if not isinstance(position, dict):
        return 0, 0, 0
    try:
        written, sheet, used = (int(position[key]) for key in ("written", "sheet", "used"))
        for start in range(0, written, FOLDER_SIZE):
            number, stop = start // FOLDER_SIZE, min(start + FOLDER_SIZE, written)
            if (folder / "metadata" / f"{number}.npy").read_text() != _metadata_lines(number, labels[start:stop]):
                return 0, 0, 0
            for i in range(start, stop):
                images[i] = _from_png((folder / "imgs" / str(number) / f"sample_{i - start}.png").read_bytes())
        return written, sheet, used
    except (OSError, ValueError, KeyError, TypeError, IndexError, zlib.error):
        return 0, 0, 0


def _from_png(data: bytes) -> np.ndarray:
    """Inverse of `png` for images of this task; ValueError or zlib.error for other bytes."""
    image = np.frombuffer(zlib.decompress(data[41:-16]), dtype=np.uint8).reshape(SIZE, SIZE + 1)[:, 1:]
    if png(image) != data:
        raise ValueError("not written by this module")
    return image


def png(image: np.ndarray) -> bytes:
    """A gray image as PNG."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    height, width = image.shape
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])  # 8 bits, gray
    rows = np.pad(image, ((0, 0), (1, 0))).tobytes()  # each row opens with its filter: none
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def load(folder: str | Path, contour_length: int = CONTOUR_LENGTH) -> TokenData:
    """Read a folder with imgs/ and metadata/, or the released archive's folder with one such per contour length.

    Without a splits.json, 80 % are for training, 10 % for validation and 10 % for test, drawn with a fixed seed.
    """
    folder = _home(Path(folder), contour_length)
    require_complete(folder)
    files = _metadata(folder)
    if not files:
        raise DataError(
            f"{folder}: no metadata/*.npy and so no images; 'primal data pathfinder --out {folder}' draws some"
        )
    arrays = cached(folder, "images", _sources(folder), None, lambda: read(folder, files))
    images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    tokens = images.reshape(len(images), -1)
    splits = {name: TokenSplit(tokens[rows], labels[rows]) for name, rows in _splits(folder, len(labels)).items()}
    return TokenData("pathfinder", **splits, vocabulary=256, classes=2, padded=False)


def _home(folder: Path, contour_length: int) -> Path:
    inner = folder / f"curv_contour_length_{contour_length}"
    return inner if inner.is_dir() else folder


def _metadata(folder: Path) -> list[Path]:
    files = [file for file in (folder / "metadata").glob("*.npy") if file.stem.isdecimal()]
    return sorted(files, key=lambda file: int(file.stem))


def _sources(folder: Path) -> list[Path | str]:
    """Everything that the arrays depend on: metadata and images."""
    images = [os.path.join(place, name) for place, _, names in os.walk(folder / "imgs") for name in names]
    return [*_metadata(folder), *sorted(images)]


def _splits(folder: Path, cases: int) -> dict[str, slice | np.ndarray]:
    file = folder / "splits.json"
    if not file.exists():
        if cases < 10:
            raise DataError(f"{folder}: {cases} images are too few to split off validation and test")
        order = np.random.default_rng(0).permutation(cases)
        ends = cases * 8 // 10, cases * 9 // 10
        parts = np.split(order, ends)
        return {name: np.sort(part) for name, part in zip(SIZES, parts, strict=True)}
    with reading(file, "a JSON object"):
        content = json.loads(file.read_bytes())
    sizes: list[Any] = [content.get(name) for name in SIZES] if isinstance(content, dict) else []
    if not sizes or not all(type(size) is int and 0 < size <= cases for size in sizes):
        raise DataError(f"{file}: must hold the numbers of train, valid and test, from 1 to {cases} each")
    if sum(sizes) != cases:
        raise DataError(f"{file}: {sum(sizes)} cases in splits of {sizes} where the metadata lists {cases} images")
    ends_of = np.cumsum(sizes)
    return {name: slice(end - size, end) for name, size, end in zip(SIZES, sizes, ends_of, strict=True)}


def read(folder: Path, files: list[Path]) -> Arrays:
    """All images that the metadata lists, in their order."""
    pillow = import_package("PIL.Image", "reading PNG files")
    images, labels = [], []
    for place, label, where in _entries(folder, files):
        try:
            with pillow.open(io.BytesIO(place.read_bytes())) as image:
                pixels = np.asarray(image.convert("L"))
        except Exception as error:  # Pillow's decoders raise almost any type for damaged files
            reason = "is missing" if isinstance(error, FileNotFoundError) else "is no image"
            raise DataError(f"{place} {reason}, though {where} lists it") from None
        if pixels.shape != (SIZE, SIZE):
            raise DataError(f"{place}: {pixels.shape[1]}×{pixels.shape[0]} pixels where {SIZE}×{SIZE} are needed")
        images.append(pixels)
        labels.append(label)
    return {"images": np.stack(images), "labels": np.array(labels, dtype=np.uint8)}


def _entries(folder: Path, files: list[Path]) -> Iterator[tuple[Path, int, str]]:
    empty = True
    for file in files:
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            words = line.split()
            if len(words) < 4 or words[3] not in ("0", "1"):
                raise DataError(f"{file}, line {number}: expected folder, file, number and label 0 or 1")
            empty = False
            yield folder / words[0] / words[1], int(words[3]), f"{file.name}, line {number},"
    if empty:
        raise DataError(f"{folder}: the metadata lists no images")


def sheet(split: TokenSplit, columns: int = 10, scale: int = 3, gap: int = 2) -> np.ndarray:
    """The first images of a split on one gray picture, for looking at: two rows connected, and below them two that are
    not. Where there are too few, places stay black."""
    images = np.zeros((2, 2 * columns, SIZE, SIZE), dtype=np.uint8)
    for shown, label in zip(images, (1, 0), strict=True):
        found = split.tokens[np.flatnonzero(split.labels == label)[: len(shown)]]
        shown[: len(found)] = found.reshape(-1, SIZE, SIZE)
    big = np.kron(images.reshape(4, columns, SIZE, SIZE), np.ones((scale, scale), dtype=np.uint8))
    big = np.pad(big, ((0, 0), (0, 0), (gap, gap), (gap, gap)), constant_values=96)
    return np.concatenate([np.concatenate(list(row), axis=1) for row in big])
