"""Run folders, a spectrum and a benchmark as the library writes them, with numbers that are easy to find again."""

from pathlib import Path
from typing import Any

from primal_attention.train import checkpoint
from primal_attention.train.config import override, to_plain
from primal_attention.train.uea import UEARecipe, paper_recipe
from primal_attention.utils.files import write_csv, write_json

RECIPE = "uea/JapaneseVowels"
EPOCHS = 5


def recipe(label: str, seed: int, **changes: Any) -> UEARecipe:
    settings = {"seed": seed, "model.attention": (label,), "model.embed_dim": 16, "trainer.epochs": EPOCHS}
    return override(paper_recipe("JapaneseVowels"), {**settings, **changes})


def config(label: str, seed: int, **changes: Any) -> dict[str, Any]:
    return to_plain(recipe(label, seed, **changes))


def summary(label: str, seed: int, accuracy: float) -> dict[str, Any]:
    primal = label.startswith("primal")
    return {
        "recipe": RECIPE,
        "format": checkpoint.FORMAT,
        "version": "0",
        "benchmark": "uea",
        "label": label,
        "seed": seed,
        "scores": {
            "last": {"epoch": EPOCHS, "accuracy": accuracy, "loss": 0.1},
            "best_on_test": {"epoch": 3, "accuracy": accuracy + 0.01},
        },
        "test": {"accuracy": accuracy, "loss": 0.1},
        "epochs": EPOCHS,
        "parameters": 1234,
        "primal_layers": 2 if primal else 0,
        "objective": {"first": 3.0, "last": 0.5} if primal else None,
        "seconds_per_epoch": 0.5 + 0.1 * seed,
        "peak_memory_bytes": None,
        "device": "cpu",
        "torch": "2",
        "data": {"set": "JapaneseVowels", "train_cases": 270},
    }


def put_run(place: Path, label: str, seed: int, accuracy: float, **changes: Any) -> Path:
    """A finished run folder without weights."""
    settings = recipe(label, seed, **changes)
    plan = checkpoint.Plan(EPOCHS)
    checkpoint.write_config(place, settings, plan, name=RECIPE, command=f"primal train {RECIPE} --seed {seed}")
    rows = []
    for epoch in range(1, EPOCHS + 1):
        row = {"epoch": epoch, "step": epoch, "lr": 1e-3, "task_loss": 2.0 / epoch}
        row |= {"J": 3.0 / epoch} if label.startswith("primal") else {}
        rows.append(row | {"test_accuracy": accuracy * epoch / EPOCHS, "test_loss": 1.0 / epoch})
    write_csv(place / "metrics.csv", rows)
    write_json(place / "summary.json", summary(label, seed, accuracy))
    return place


def put_runs(folder: Path, accuracies: dict[str, tuple[float, ...]]) -> Path:
    """Run folders LABEL-seedN of several models, with an accuracy for each seed."""
    for label, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            put_run(folder / f"{label.replace('/', '')}-seed{seed}", label, seed, accuracy)
    return folder


def bench() -> dict[str, Any]:
    sizes = {"embed_dim": 64, "num_heads": 2, "batch": 1, "peak_bytes": None}
    rows = []
    for name, power in (("sdpa", 2), ("primal-cpu", 1)):
        for n, seconds in ((256, 1e-3), (1024, 1e-3 * 4**power), (4096, None if power == 2 else 1.6e-2)):
            numbers = {"length": n, "seconds": seconds, "saved_bytes": 1000 * n if seconds else None}
            status = "ok" if seconds else "out of memory"
            rows.append({"name": name, "label": name, "kind": "", "status": status, **sizes, **numbers})
    hardware = {"device": "cpu", "cpu": "a processor", "cores": 2, "threads": 1, "load_before": 2.0}
    about = {"format": 1, "kind": "attention", "hardware": hardware, "versions": {"torch": "2"}}
    return {**about, "settings": {"dtype": "float32", "causal": False}, "rows": rows}


SPECTRUM = "layer,index,value\n0,1,2.0\n0,2,1.0\n0,3,1e-12\n"
