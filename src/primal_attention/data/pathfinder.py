"""Pathfinder (Linsley et al., 2018; Long-Range Arena): do two dots on a 32×32 image lie on one dashed contour?

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

from primal_attention.data.contours import SIZE, Canvas
from primal_attention.data.errors import DataError, import_package
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
from primal_attention.data.tokens import Progress, TokenData, TokenSplit

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
