"""Do uncertainties flag series of classes that were not in the training?

    python benchmarks/unseen_classes.py --out results/uea-modern-uncertainty/test.json
    python benchmarks/unseen_classes.py --holdout 0.25 --out results/uea-modern-uncertainty/held_out.json

Each seed removes a third of the classes from the training samples, drawn at random. The scored samples are all test
samples, or with `--holdout` a part of the training samples of the known classes and all of the removed ones. Stored is
the area under the ROC curve for "the class is unknown" of two scores: the entropy of `predict_proba`, and
`predict_uncertainty`. The default sets are those of `primal table uea-modern`
with at least six classes and fewer than 1,000 training samples.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primal_attention import PrimalClassifier
from primal_attention.data import uea
from primal_attention.utils.files import write_json
from primal_attention.utils.provenance import collect, hash_files

SETS = ["ArticularyWordRecognition", "Handwriting", "JapaneseVowels", "NATOPS", "UWaveGestureLibrary"]


def auroc(score: np.ndarray, is_unknown: np.ndarray) -> float:
    """The probability that a sample of an unknown class has the larger score; ties count half."""
    gap = score[is_unknown][:, None] - score[~is_unknown]
    return float((gap > 0).mean() + 0.5 * (gap == 0).mean())


def run(name: str, seed: int, holdout: float) -> dict[str, Any]:
    data = uea.load(name)
    rng = np.random.default_rng(seed)
    unknown = rng.permutation(len(data.classes))[: max(1, len(data.classes) // 3)]
    known = np.flatnonzero(~np.isin(data.train.labels, unknown))
    train, scored = data.train.take(known), data.test
    if holdout:
        rows, holdout_rows = uea.stratified_holdout(train.labels, holdout, seed)
        rest = np.flatnonzero(np.isin(data.train.labels, unknown))
        train, scored = train.take(rows), data.train.take(np.concatenate([known[holdout_rows], rest]))
    model = PrimalClassifier(device="cpu", random_state=seed).fit([s.T for s in train.series], train.labels)
    X = [s.T for s in scored.series]
    is_unknown = np.isin(scored.labels, unknown)
    probabilities = model.predict_proba(X)
    entropy = -(probabilities * np.log(probabilities.clip(min=1e-300))).sum(axis=1)
    accuracy = (model.classes_[probabilities.argmax(axis=1)] == scored.labels)[~is_unknown].mean()
    return {
        "set": name,
        "seed": seed,
        "unknown_classes": sorted(data.classes[i] for i in unknown),
        "samples": {"known": int((~is_unknown).sum()), "unknown": int(is_unknown.sum())},
        "accuracy_of_known": float(accuracy),
        "auroc": {"entropy": auroc(entropy, is_unknown), "variance": auroc(model.predict_uncertainty(X), is_unknown)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--holdout", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    files = [file for name in options.sets if (file := uea.find(name, None)) is not None]
    files += [file.with_name(file.name.replace("_TRAIN", "_TEST")) for file in files]
    command, device = shlex.join(["python", *sys.argv]), torch.device("cpu")
    stored = collect(command=command, device=device, data_sha256=hash_files(files))
    rows = []
    for name in options.sets:
        for seed in range(options.seeds):
            rows.append(run(name, seed, options.holdout))
            print(name, seed, rows[-1]["auroc"], flush=True)
            write_json(options.out, {**stored, "holdout": options.holdout, "runs": rows})
        own = [row["auroc"] for row in rows if row["set"] == name]
        print(name, {key: round(statistics.mean(a[key] for a in own), 3) for key in own[0]})


if __name__ == "__main__":
    main()
