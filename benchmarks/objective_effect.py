"""What the KSVD objective does to a layer: J, rank and orthogonality of the scores, and the spectrum, over training.

    python benchmarks/objective_effect.py uea/JapaneseVowels --eta 0 0.5
    python benchmarks/objective_effect.py lra-short/text --data data/lra/text --eta 0 0.05
    python benchmarks/objective_effect.py lm/wikipedia --set model.primal_mode=mean --eta 0 5e-5
    python benchmarks/objective_effect.py --plot        # draws all stored files as one figure

Trains a recipe once for each η with the same seed and no test scores. After every evaluation interval it measures all
Primal layers in evaluation mode on the same batch of training inputs. Per sequence and head, with E (N, s) the e-scores
of the valid tokens (R, the r-scores, likewise):

    J                 the objective of the layer
    effective rank    exp of the entropy of the normalised singular values of E and of R; at most s
    orthogonality     mean |cosine| between two columns of E, and of R; zero at a singular value decomposition
    explained         share of the squared singular values of the kernel matrix K in its first 1, s/4 and s directions

Writes results/objective/RECIPE.json, and results/objective/effect.png with --plot.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primal_attention import PrimalAttention, record_objective, spectrum
from primal_attention.cli.table import read_change
from primal_attention.ksvd.spectrum import effective_rank
from primal_attention.nn.objective import primal_layers
from primal_attention.train import loop, registry
from primal_attention.train.config import override
from primal_attention.utils import provenance
from primal_attention.utils.files import write_json

SEQUENCES = 16  # of the batch that is measured
MEASURES = {
    "J": "J",
    "effective_rank": "effective rank of the scores",
    "orthogonality": "mean |cosine| of two score columns",
    "explained": "variance of K in its first direction",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="name of a recipe with Primal layers")
    parser.add_argument("--eta", type=float, nargs="+", default=[0.0, 0.1], help="weights of the KSVD loss")
    parser.add_argument("--data", type=Path, help="data folder of the recipe")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the recipe to change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/objective"))
    parser.add_argument("--plot", action="store_true", help="draw all stored files instead of training")
    args = parser.parse_args()
    if args.plot:
        draw(args.out)
        return 0
    if args.recipe is None:
        parser.error("name a recipe, or --plot")
    changes: dict[str, Any] = {"seed": args.seed, "test": False, "trainer.progress": False}
    changes |= dict(map(read_change, args.set))
    if args.data is not None:
        changes["data.folder"] = args.data
    curves, facts = [], {}
    for eta in args.eta:
        recipe = override(registry.get(args.recipe), {**changes, "eta": eta}).resolved()
        training = MeasuredTraining(recipe, loop.build(recipe), title=f"{args.recipe}, η = {eta:g}")
        training.fit()
        curves.append({"eta": eta, "rows": training.measurements})
        facts = dict(training.experiment.facts)
    command = re.sub(r" --(data|out) \S+", "", shlex.join(["python", *sys.argv]))  # folders of this machine
    origin = provenance.collect(command=command, device=training.device, data_sha256=facts.get("sha256"))
    file = args.out / f"{args.recipe.replace('/', '-')}.json"
    write_json(file, {"recipe": args.recipe, "rank": recipe.model.rank, "data": facts, "curves": curves, **origin})
    print(f"wrote {file}")
    return 0


class MeasuredTraining(loop.Training):
    """A training that measures its Primal layers before the first step and after every evaluation interval."""

    def start(self) -> None:
        super().start()
        batch = next(iter(self.batches))
        inputs = self.module.inputs(tuple(t[:SEQUENCES].to(self.device) for t in batch))
        self.inputs: tuple[Any, ...] = tuple(inputs)
        self.measurements: list[dict[str, Any]] = [{"step": 0, "layers": measure(self.module.model, self.inputs)}]

    def finish_epoch(self, row: dict[str, Any]) -> None:
        super().finish_epoch(row)
        if self.is_finished or len(self.state.rows) % self.interval == 0:
            layers = measure(self.module.model, self.inputs)
            self.measurements.append({"step": self.module.global_step, "layers": layers})

    @property
    def interval(self) -> int:
        """Epochs between two measurements: at most 20 measurements in a training."""
        return max(self.config.evaluate_every, self.config.epochs // 20)


def measure(model: torch.nn.Module, inputs: tuple[Any, ...]) -> dict[str, dict[str, float]]:
    """Measure every Primal layer of a model on one batch; the model and its random numbers are left unchanged."""
    layers = primal_layers(model)
    names = {layer: name for name, layer in layers.items()}
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def capture(layer: PrimalAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[names[layer]] = (args, kwargs)

    hooks = [layer.register_forward_pre_hook(capture, with_kwargs=True) for layer in layers.values()]
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        with record_objective(model):
            model(*inputs)
            objectives = {name: float(layer.objective.mean()) for name, layer in layers.items()}
        for hook in hooks:
            hook.remove()
        kernels = spectrum(model, tuple(inputs))
        rows = {}
        for name, layer in layers.items():
            args, kwargs = calls[name]
            _, scores = layer(*args, **kwargs, return_scores=True)
            ranks = [float(effective_rank(torch.linalg.svdvals(side.float())).mean()) for side in scores]
            cosines = [float(mean_cosine(side.float())) for side in scores]
            share = kernels[name].explained.mean(dim=(0, 1))
            rows[name] = {
                "J": objectives[name],
                "effective_rank_e": ranks[0],
                "effective_rank_r": ranks[1],
                "orthogonality_e": cosines[0],
                "orthogonality_r": cosines[1],
                **{f"explained_{n}": float(share[min(n, len(share)) - 1]) for n in (1, layer.rank // 4, layer.rank)},
            }
    model.train(was_training)
    return rows


def mean_cosine(scores: Tensor) -> Tensor:
    """Mean |cosine| between two different columns of (…, N, s) scores."""
    columns = torch.nn.functional.normalize(scores, dim=-2)
    gram = (columns.mT @ columns).abs()
    rank = gram.shape[-1]
    return ((gram.sum(dim=(-2, -1)) - gram.diagonal(dim1=-2, dim2=-1).sum(-1)) / (rank * (rank - 1))).mean()


def draw(folder: Path) -> None:
    """One row of panels per stored recipe, one line per η: means over the layers, and over E and R."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"{folder} has no results: run a recipe first")
    figure, axes = plt.subplots(len(files), len(MEASURES), figsize=(14, 3 * len(files)), squeeze=False)
    for panels, file in zip(axes, files, strict=True):
        stored = json.loads(file.read_text())
        for axis, (key, label) in zip(panels, MEASURES.items(), strict=True):
            for curve in stored["curves"]:
                steps = [row["step"] for row in curve["rows"]]
                values = [mean_of(row["layers"], key) for row in curve["rows"]]
                axis.plot(steps, values, label=f"η = {curve['eta']:g}")
            axis.set(xlabel="step", title=f"{stored['recipe']}\n{label}")
            if key == "J" and max(map(abs, axis.get_ylim())) > 10:
                axis.set_yscale("symlog", linthresh=0.1)
        panels[0].legend()
    figure.tight_layout()
    figure.savefig(folder / "effect.png", dpi=120)
    print(f"wrote {folder / 'effect.png'}")


def mean_of(layers: dict[str, dict[str, float]], key: str) -> float:
    keys = {"J": ["J"], "explained": ["explained_1"]}.get(key, [f"{key}_e", f"{key}_r"])
    values = [layer[name] for layer in layers.values() for name in keys]
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
