"""`primal table uea-modern`: PrimalClassifier, its ablations and aeon's classifiers on sets of the UEA archive.

Every fit is a process of its own, so that compiled code and thread counts of one classifier do not reach another. It
writes one JSON file: accuracy, expected calibration error, wall and CPU seconds of fit and predict, and where they come
from. Finished fits are not run again.

    python -m primal_attention.bench.classifiers --sets NATOPS --models primal --seeds 1 --holdout 0.25

scores samples that are held out of the training samples, to choose settings without test.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.data import uea
from primal_attention.models.convolution_features import calibration_error, fit_weights, log_softmax
from primal_attention.utils.errors import RunError, check_name
from primal_attention.utils.files import write_json
from primal_attention.utils.progress import Progress

FOLDER = "uea-modern-classifiers"
SETS = (
    "ArticularyWordRecognition", "AtrialFibrillation", "BasicMotions", "FingerMovements", "Handwriting",
    "JapaneseVowels", "LSST", "NATOPS", "PenDigits", "StandWalkJump", "UWaveGestureLibrary",
)  # fmt: skip
# name: (title, settings of PrimalClassifier or None for one of aeon's)
MODELS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "primal": ("PrimalClassifier", {}),
    "multirocket-hydra": ("MultiRocketHydra (aeon)", None),
    "softmax": ("softmax instead of Primal-Attention", {"attention": "softmax"}),
    "none": ("convolution instead of attention", {"attention": "none"}),
    "inception-time": ("InceptionTime (aeon)", None),
}


def make_classifier(model: str, seed: int, threads: int, **changes: Any) -> Any:
    """An unfitted classifier with default settings."""
    if model == "multirocket-hydra":
        from aeon.classification.convolution_based import MultiRocketHydraClassifier

        return MultiRocketHydraClassifier(random_state=seed, n_jobs=threads)
    if model == "inception-time":
        from aeon.classification.deep_learning import InceptionTimeClassifier

        return InceptionTimeClassifier(random_state=seed)
    from primal_attention.train.estimator import PrimalClassifier

    return PrimalClassifier(**{**(MODELS[model][1] or {}), **changes}, device="cpu", random_state=seed)


def measure(name: str, model: str, seed: int, holdout: float, threads: int, **changes: Any) -> dict[str, Any]:
    """Fit a classifier to a set's training samples and score it on test, or on held-out training samples."""
    import torch

    from primal_attention.train.estimator import USUAL_WEIGHTS
    from primal_attention.utils.provenance import collect

    torch.set_num_threads(threads)
    data = uea.load(name)
    train, scored = data.train, data.test
    if holdout:
        fit, held_out = uea.stratified_holdout(train.labels, holdout, seed)
        train, scored = data.train.take(fit), data.train.take(held_out)
    file = uea.find(name)
    assert file is not None
    origin = collect(
        command=None, device=torch.device("cpu"), data_files=[file, file.with_name(f"{name}_TEST{file.suffix}")]
    )
    row: dict[str, Any] = {"set": name, "model": model, "seed": seed, "holdout": holdout, "changes": changes}
    row |= {"train_samples": len(train), "scored_samples": len(scored), "origin": origin}
    try:
        classifier = make_classifier(model, seed, threads, **changes)
        _, row["fit"] = timed(lambda: classifier.fit(as_input(train), train.labels))
        probabilities, row["predict"] = timed(lambda: classifier.predict_proba(as_input(scored)))
    except (ValueError, ModuleNotFoundError) as error:
        return row | {"refused": " ".join(str(error).split())[:200]}
    labels = np.searchsorted(classifier.classes_, scored.labels)
    row |= scores(probabilities, labels)
    if not hasattr(classifier, "combination_"):
        return row
    # The ablations: each part of the same fit alone, calibrated by its own held-out scores.
    row |= {"combination": classifier.combination_, "fit_seconds": classifier.fit_seconds_, "parts": {}}
    for part, values in classifier._parts(as_input(scored)).items():
        own_labels = np.searchsorted(classifier.classes_, train.labels)
        weight = fit_weights([classifier.held_out_[part]], own_labels, [USUAL_WEIGHTS[part]])
        row["parts"][part] = scores(np.exp(log_softmax(weight * values)), labels)
    return row


def scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, expected calibration error and cross-entropy."""
    own = probabilities[np.arange(len(labels)), labels]
    return {
        "accuracy": float((probabilities.argmax(axis=1) == labels).mean()),
        "calibration_error": calibration_error(probabilities, labels),
        "log_loss": float(-np.log(own.clip(min=1e-12)).mean()),
    }


def as_input(split: uea.Split) -> Any:
    """Series as aeon takes them: an array (samples, channels, time), or a list if lengths differ."""
    series = [s.T for s in split.series]
    return np.stack(series) if len({s.shape[1] for s in series}) == 1 else series


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of a function, and its wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def read_options(args: Sequence[str]) -> argparse.Namespace:
    top = argparse.ArgumentParser(prog="primal table uea-modern", description=__doc__.split("\n")[0])
    top.add_argument("--sets", nargs="+", default=list(SETS))
    top.add_argument("--models", nargs="+", default=list(MODELS), help=" ".join(MODELS))
    top.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    top.add_argument("--holdout", type=float, default=0.0, help="score this part of the training samples, not test")
    top.add_argument("--threads", type=int, default=2)
    top.add_argument("--changes", default="{}", help="settings of PrimalClassifier as JSON, to compare settings")
    top.add_argument("--results", type=Path, default=Path("results"))
    top.add_argument("--no-run", action="store_true", help="only show stored results")
    top.add_argument("--markdown", type=Path, metavar="FILE")
    top.add_argument("--single", type=int, metavar="SEED", help="one set, model and seed in this process")
    options = top.parse_args(list(args))
    for model in options.models:
        check_name(model, MODELS, "model of this table")
    return options


def run_missing(options: argparse.Namespace) -> None:
    """Run the fits that have no file yet, one process after another; the first seed of everything first."""
    jobs = [(name, model, seed) for seed in range(options.seeds) for name in options.sets for model in options.models]
    missing = [job for job in jobs if not result_file(options.results, *job).exists()]
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")}
    same = ["--holdout", str(options.holdout), "--changes", options.changes, "--results", str(options.results)]
    with Progress(len(missing), "fits") as bar, Path(tempfile.gettempdir(), "quiet.lock").open("w") as lock:
        for name, model, seed in missing:
            command = [sys.executable, "-m", "primal_attention.bench.classifiers", "--sets", name, "--models", model]
            command += ["--single", str(seed), "--threads", str(options.threads), *same]
            fcntl.flock(lock, fcntl.LOCK_EX)  # one measurement at a time on this machine
            done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
            fcntl.flock(lock, fcntl.LOCK_UN)
            if done.returncode:
                raise RunError(f"{name} {model} seed {seed} failed: {(done.stderr.strip() or 'no message')[-300:]}")
            row = json.loads(result_file(options.results, name, model, seed).read_text(encoding="utf-8"))
            score = f"accuracy {row['accuracy']:.3f}" if "accuracy" in row else f"refused: {row['refused']}"
            bar.advance(f"{name} {model} seed {seed}: {score}")


def result_file(results: Path, name: str, model: str, seed: int) -> Path:
    return results / FOLDER / name / f"{model}-seed{seed}.json"


def main(args: Sequence[str]) -> int:
    options = read_options(args)
    if options.single is None:
        run_missing(options)
        return 0
    name, model = options.sets[0], options.models[0]
    changes = json.loads(options.changes)
    row = measure(name, model, options.single, options.holdout, options.threads, **changes)
    write_json(result_file(options.results, name, model, options.single), row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
