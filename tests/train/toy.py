"""Small sets of every kind, small recipes, and the rows of a run.

`recipe` has everything random switched on: dropout, mixup, augmentation, averaging.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.data.lra import listops
from primal_attention.data.uea import SeriesData, Split
from primal_attention.train import registry
from primal_attention.train.config import override, to_plain
from primal_attention.train.uea import UEARecipe


def data(name: str = "Toy") -> SeriesData:
    """Three classes that differ in a wave's frequency; lengths from 6 to 12."""
    rng = np.random.default_rng(0)

    def split(samples: int) -> Split:
        labels = np.arange(samples) % 3
        series = []
        for label in labels:
            time = np.arange(rng.integers(6, 13))[:, None]
            wave = np.sin(0.5 * (1 + label) * time + rng.uniform(0, 6, 2))
            series.append(wave + 0.1 * rng.standard_normal((len(time), 2)))
        return Split(series, labels.astype(np.int64))

    return SeriesData(name, split(30), split(15), ("a", "b", "c"))


def folder(place: Path) -> Path:
    """The toy set as files."""
    place.mkdir(parents=True, exist_ok=True)
    for part, split in (("TRAIN", data().train), ("TEST", data().test)):
        X = np.full((len(split), 2, 12), np.nan)
        for row, series in zip(X, split.series, strict=True):
            row[:, : len(series)] = series.T
        np.savez(place / f"Toy_{part}.npz", X=X, y=np.array(data().classes)[split.labels])
    return place


def write_expressions(place: Path) -> Path:
    """ListOps, enough for a few batches."""
    shape = listops.Shape(max_depth=4, max_args=4, min_length=5, max_length=90)
    return listops.write(place, {"train": 36, "valid": 6, "test": 6}, shape=shape)


def write_articles(place: Path) -> Path:
    """Three splits of short articles."""
    for split, count in (("train", 12), ("valid", 3), ("test", 3)):
        articles = (f" = {split} {i} = \n\nThe cat {i} sat on the mat of {split}, and sat.\n" for i in range(count))
        (place / f"wiki.{split}.txt").write_text("".join(articles))
    return place


# A small model and a short training on a CPU, by flags and as settings.
FLAGS = """
--model.embed-dim 8 --model.num-heads 2 --model.layers 2 --model.ffn-dim 16 --model.rank 3 --model.landmarks 4
--trainer.epochs 1 --trainer.batch-size 8 --trainer.accelerator cpu --trainer.no-progress
""".split()  # noqa: SIM905 (reads as it is typed)
SMALL: dict[str, Any] = {
    "model.embed_dim": 8,
    "model.num_heads": 2,
    "model.layers": 2,
    "model.ffn_dim": 16,
    "model.rank": 3,
    "model.landmarks": 4,
    "trainer.epochs": 2,
    "trainer.batch_size": 8,
    "trainer.precision": "32-true",
    "trainer.accelerator": "cpu",
    "trainer.progress": False,
    "trainer.compile": "off",
}
# No random numbers that depend on the process.
PLAIN: dict[str, Any] = {
    "model.dropout": 0.0,
    "augment.warp": 0.0,
    "augment.scale": 0.0,
    "augment.jitter": 0.0,
    "augment.mixup": 0.0,
}


def small(name: str, place: Path | None, **changes: Any) -> Any:
    """Return a small recipe of any benchmark that reads a folder; `model__rank` stands for model.rank."""
    recipe = registry.get(name)
    fields = to_plain(recipe)
    settings = {key: value for key, value in SMALL.items() if key.split(".")[1] in fields[key.split(".")[0]]}
    if recipe.trainer.steps_per_epoch:
        settings |= {"trainer.steps_per_epoch": 3, "trainer.batch_size": 4}
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return override(recipe, {**settings, "data.folder": place, **changes})


def recipe(place: Path, **changes: Any) -> UEARecipe:
    kernels = {"model__stem_kernel": 3, "model__local_kernel": 3}
    return small("uea-modern/Toy", place, **{"trainer__epochs": 3, **kernels, **changes})


def rows(run: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv."""
    with (run / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
