"""Fits behind `primal table uea-modern`: PrimalClassifier, its controls and aeon's classifiers on the UEA archive.

Every fit runs in its own process, so that compiled code and thread counts of one classifier do not reach another. It
leaves one summary, as a training does: accuracy, expected calibration error, wall and CPU seconds, and provenance.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.data import uea
from primal_attention.models.convolution_features import calibration_error, fit_weights
from primal_attention.utils.errors import check_name
from primal_attention.utils.files import write_json
from primal_attention.utils.progress import Progress

PRIMAL_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "primal": {},
    "primal-eta0": {"eta": 0.0},
    "softmax": {"attention": "softmax"},
    "none": {"attention": "none"},
}
"""Parameters of PrimalClassifier by model; other models are aeon's."""


@dataclass(frozen=True)
class Fit:
    """A classifier to fit to a set, and the file of its summary."""

    dataset: str
    model: str
    seed: int
    settings: Mapping[str, Any]
    """`holdout`, the part of the training samples that is scored instead of test (0: test), and parameters of
    PrimalClassifier."""
    file: Path
    folder: Path | None = None
    """Folder of the data; None is the default folder."""
    threads: int = 2
    command: str | None = None
    commit: str | None = None
    """Commit of the code, if git is not available."""

    @property
    def recipe(self) -> str:
        return f"uea-modern-classifiers/{self.dataset}"


def check_parameters(names: Iterable[str]) -> None:
    """Raise a RunError for a name that is not a parameter of PrimalClassifier."""
    from primal_attention.train.estimator import PrimalClassifier

    for name in names:
        check_name(name, inspect.signature(PrimalClassifier).parameters, "parameter of PrimalClassifier")


def run_fits(fits: Sequence[Fit]) -> list[str]:
    """Run fits in processes, one after the other; return a line for each that failed."""
    errors = []
    with Progress(len(fits), "fits") as bar:
        for fit in fits:
            threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(fit.threads))
            words = [sys.executable, "-m", __name__, json.dumps(asdict(fit), default=str)]
            done = subprocess.run(words, env=os.environ | threads, capture_output=True, text=True, check=False)
            name = f"{fit.dataset} {fit.model} seed {fit.seed}"
            if done.returncode:
                errors.append(f"{name}: {(done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]}")
            bar.advance(errors[-1] if done.returncode else f"{name}: {done.stdout.strip()}")
    return errors


def run_fit(fit: Fit) -> dict[str, Any]:
    """Fit a classifier to training samples and score it on test, or on holdout samples; return the summary."""
    import torch

    from primal_attention.utils.provenance import collect, device_name, hash_files

    torch.set_num_threads(fit.threads)
    data, cpu = uea.load(fit.dataset, fit.folder), torch.device("cpu")
    train, scored, prefix = data.train, data.test, ""
    if fit.settings["holdout"]:
        rows, holdout_rows = uea.stratified_holdout(train.labels, fit.settings["holdout"], fit.seed)
        train, scored, prefix = data.train.take(rows), data.train.take(holdout_rows), "validation_"
    file = uea.find(fit.dataset, fit.folder)
    assert file is not None
    files = [file, file.with_name(file.name.replace("_TRAIN", "_TEST"))]
    origin = collect(command=fit.command, device=cpu, commit=fit.commit, data_sha256=hash_files(files))
    summary = {"format": 1, "benchmark": "uea", "label": fit.model, "seed": fit.seed, "config": dict(fit.settings)}
    summary |= {"recipe": fit.recipe, "device": device_name(origin["hardware"])}
    facts = {"set": fit.dataset, "train_samples": len(train), "scored_samples": len(scored)}
    summary |= {"scores": {}, "data": facts, "torch": torch.__version__, **origin}
    try:
        classifier = make_classifier(fit)
        _, fit_cost = measure_cost(lambda: classifier.fit(as_input(train), train.labels))
        probabilities, predict_cost = measure_cost(lambda: classifier.predict_proba(as_input(scored)))
    except (ValueError, ModuleNotFoundError) as error:  # the classifier does not take this set, or lacks a package
        return summary | {"data": {**facts, "refused": " ".join(str(error).split()).partition(". ")[0]}}
    labels = np.searchsorted(classifier.classes_, scored.labels)
    scores = {"last": score_probabilities(probabilities, labels, prefix), "fit": fit_cost, "predict": predict_cost}
    if fit.model in PRIMAL_PARAMETERS:
        own_labels = np.searchsorted(classifier.classes_, train.labels)
        scores |= score_parts(classifier, as_input(scored), labels, own_labels, prefix)
        summary["combination"] = classifier.combination_
    return summary | {"scores": scores}


def make_classifier(fit: Fit) -> Any:
    """Build a classifier with its default settings, changed by those of the fit."""
    if fit.model == "multirocket-hydra":
        from aeon.classification.convolution_based import MultiRocketHydraClassifier

        return MultiRocketHydraClassifier(random_state=fit.seed, n_jobs=fit.threads)
    if fit.model == "inception-time":
        from aeon.classification.deep_learning import InceptionTimeClassifier

        return InceptionTimeClassifier(random_state=fit.seed)
    from primal_attention.train.estimator import PrimalClassifier

    changes = {name: value for name, value in fit.settings.items() if name != "holdout"}
    return PrimalClassifier(**{**PRIMAL_PARAMETERS[fit.model], **changes}, device="cpu", random_state=fit.seed)


def score_probabilities(probabilities: np.ndarray, labels: np.ndarray, prefix: str) -> dict[str, float]:
    """Return accuracy, expected calibration error and cross-entropy."""
    own = probabilities[np.arange(len(labels)), labels]
    return {
        f"{prefix}accuracy": float((probabilities.argmax(axis=1) == labels).mean()),
        f"{prefix}calibration_error": calibration_error(probabilities, labels),
        f"{prefix}loss": float(-np.log(own.clip(min=1e-12)).mean()),
    }


def score_parts(
    classifier: Any, series: Any, labels: np.ndarray, train_labels: np.ndarray, prefix: str
) -> dict[str, dict[str, float]]:
    """Return the scores of each part of a fitted PrimalClassifier alone, calibrated by its own cross-fitted scores."""
    from scipy.special import softmax

    from primal_attention.train.estimator import USUAL_WEIGHTS

    scores = {}
    for part, values in classifier._parts(series).items():
        weight = fit_weights([classifier.held_out_[part]], train_labels, [USUAL_WEIGHTS[part]])
        scores[part] = score_probabilities(softmax(weight * values, axis=1), labels, prefix)
        scores[part]["fit_seconds"] = classifier.fit_seconds_[part]
    return scores


def as_input(split: uea.Split) -> Any:
    """Return series as aeon takes them: an array (samples, channels, time), or a list if lengths differ."""
    series = [s.T for s in split.series]
    return np.stack(series) if len({s.shape[1] for s in series}) == 1 else series


def measure_cost(function: Callable[[], Any]) -> tuple[Any, dict[str, float | None]]:
    """Return the result of a function, its wall and CPU seconds, and the cores that other processes used meanwhile."""
    wall, cpu, busy = time.perf_counter(), time.process_time(), busy_seconds()
    result = function()
    seconds, cpu_seconds, busy_after = time.perf_counter() - wall, time.process_time() - cpu, busy_seconds()
    others = None if busy is None or busy_after is None else max(0.0, busy_after - busy - cpu_seconds) / seconds
    return result, {"seconds": seconds, "cpu_seconds": cpu_seconds, "other_cores": others}


def busy_seconds() -> float | None:
    """Return the CPU seconds of all processes of this machine since its start; None where Linux does not count them."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def main(text: str) -> None:
    """Run the fit that JSON describes and write its summary."""
    fields = json.loads(text)
    folder = None if fields["folder"] is None else Path(fields["folder"])
    fit = Fit(**{**fields, "file": Path(fields["file"]), "folder": folder})
    summary = run_fit(fit)
    write_json(fit.file, summary)
    score = {name: value for name, value in summary["scores"].get("last", {}).items() if name.endswith("accuracy")}
    shown = [f"{name.replace('_', ' ')} {value:.3f}" for name, value in score.items()]
    print(*(shown or [f"refused: {summary['data']['refused']}"]))


if __name__ == "__main__":
    main(sys.argv[1])
