"""`primal demo`: the whole idea on real data in about two minutes.

Trains a small PrimalFormer with the KSVD objective and the same network with softmax attention on JapaneseVowels (nine
speakers say two vowels; who spoke?), measures both on test cases that training never saw, and draws one picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.cli.flags import parse
from primal_attention.train.config import OptimConfig, TrainerConfig, require, to_plain
from primal_attention.train.uea import AugmentConfig, ClassifierConfig, UEAData, UEARecipe

if TYPE_CHECKING:
    from rich.console import Console


ABOUT = """Train a small PrimalFormer and the same network with softmax attention on real data, about two minutes.

Example: primal demo --out runs/demo"""
LENGTHS = tuple(2**k for k in range(7, 15))
SINGULAR_VALUES = 20


@dataclass(frozen=True)
class DemoArguments:
    out: Path = Path("runs/demo")
    """Folder of the two runs, the numbers (demo.json) and the picture (demo.png)."""
    epochs: int = 40
    seed: int = 0
    max_length: int = LENGTHS[-1]
    """Longest sequence that is timed."""

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"epochs must be at least 1 (got {self.epochs})")
        require(self.max_length >= LENGTHS[0], f"max-length must be at least {LENGTHS[0]} (got {self.max_length})")


@dataclass(frozen=True)
class Result:
    """One line of the demo's table."""

    attention: str
    accuracy: float
    seconds_per_epoch: float
    parameters: int
    j_before: float | None
    j_after: float | None


def recipe(attention: str, *, epochs: int, seed: int) -> UEARecipe:
    """Both trainings: the same small network and settings, another attention. Test is measured once, at the end."""
    return UEARecipe(
        seed=seed,
        eta=0.1,
        data=UEAData(name="JapaneseVowels", clip=False),
        model=ClassifierConfig(
            kind="modern",
            attention=(attention,),
            embed_dim=64,
            num_heads=4,
            layers=2,
            ffn_dim=128,
            dropout=0.1,
            rank=16,
            landmarks=26,
        ),
        augment=AugmentConfig(scale=0.1, jitter=0.03, mixup=0.2, label_smoothing=0.1),
        optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05, schedule="onecycle", clip=1.0),
        trainer=TrainerConfig(epochs=epochs, batch_size=32, ema=0.99, evaluate_every=epochs, accelerator="cpu"),
    )


def main(args: Sequence[str]) -> int:
    arguments = parse(DemoArguments, args, prog="primal demo", about=ABOUT)
    from rich.console import Console

    from primal_attention.report import figures
    from primal_attention.utils.files import write_json

    console = Console(highlight=False)
    console.print(
        "[bold]JapaneseVowels[/]: 270 recordings to learn from, 370 to be tested on, 12 channels, 7 to 29 steps; "
        "which of nine speakers was it?\n"
        "Two networks that differ in one thing, how a step looks at the other steps:\n"
        "  [bold]primal[/]   Primal-Attention: linear in the length, trained with the KSVD objective J\n"
        "  [bold]softmax[/]  the usual attention: quadratic in the length\n"
    )
    import torch

    # The networks are too small to share between cores, and one thread gives times that other programs hardly disturb.
    torch.set_num_threads(1)
    results, sigma = [], {}
    for attention in ("primal", "softmax"):
        result, values = run(recipe(attention, epochs=arguments.epochs, seed=arguments.seed), arguments.out)
        results.append(result)
        sigma[attention] = values
    seconds = time_both(arguments.max_length)
    plain_seconds = {name: {str(n): s for n, s in points.items()} for name, points in seconds.items()}
    numbers = {"results": to_plain(results), "seconds": plain_seconds, "singular_values": sigma}
    write_json(arguments.out / "demo.json", numbers)
    picture = figures.demo(arguments.out / "demo.png", seconds, sigma)
    show(console, results, seconds)
    console.print(f"picture: {picture}", soft_wrap=True)
    return 0


def run(recipe: UEARecipe, out: Path) -> tuple[Result, list[float]]:
    """Train one network; its line of the table and its singular values."""
    from primal_attention.report import look
    from primal_attention.train import checkpoint, loop
    from primal_attention.train.batches import Batches

    experiment = loop.build(recipe)
    before = look.mean_objective(experiment.module.model, experiment.train)
    place = checkpoint.unused_folder(out / recipe.label())
    summary = loop.train(recipe, place, name=f"demo/{recipe.label()}")
    model = experiment.module.final_model
    loop.load_weights(model, place / "model.safetensors")
    after = look.mean_objective(model, experiment.train)
    x, mask, _ = next(iter(Batches(experiment.test.tensors, batch_size=64)))
    series = [case[~padding] for case, padding in zip(x, mask, strict=True)]
    values = look.singular_values(model, series, SINGULAR_VALUES)
    accuracy, seconds = summary["scores"]["last"]["accuracy"], summary["seconds_per_epoch"]
    return Result(recipe.label(), accuracy, seconds, summary["parameters"], before, after), values


def time_both(max_length: int) -> dict[str, dict[int, float]]:
    """Both attentions at growing lengths on this machine, with a bar."""
    from rich.progress import Progress

    from primal_attention.report import look

    lengths = [n for n in LENGTHS if n <= max_length]
    with Progress() as progress:
        task = progress.add_task("timing sequences of growing length", total=2 * len(lengths))
        return look.time_lengths(
            {"softmax": {}, "primal": {"rank": 16, "landmarks": 26}},
            lengths,
            embed_dim=64,
            num_heads=4,
            step=lambda: progress.advance(task),
        )


def show(console: Console, results: Sequence[Result], seconds: Mapping[str, Mapping[int, float]]) -> None:
    from rich.table import Table

    table = Table(title="Same network, same training, another attention")
    for heading in ("attention", "test accuracy", "time per epoch", "parameters", "J before", "J after"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for r in results:
        objective = ["–" if j is None else f"{j:+.3f}" for j in (r.j_before, r.j_after)]
        accuracy = f"{100 * r.accuracy:.1f} %"
        table.add_row(r.attention, accuracy, f"{r.seconds_per_epoch:.2f} s", f"{r.parameters:,}", *objective)
    console.print(table)
    longest = max(set(seconds["primal"]) & set(seconds["softmax"]))
    factor = seconds["softmax"][longest] / seconds["primal"][longest]
    console.print(
        "The test cases were looked at once, after the last epoch. J is the KSVD objective: layers that solve the "
        "singular value decomposition of their kernel have J = 0, and training pulls it there.\n"
        f"Series this short do not need a fast attention; at {longest:,} tokens one Primal layer takes "
        f"1/{factor:.0f} of the softmax layer's time on this machine (left half of the picture)."
    )
