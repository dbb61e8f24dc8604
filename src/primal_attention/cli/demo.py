"""`primal demo`: the whole idea on real data in about two minutes.

Trains a small PrimalFormer with the KSVD objective and the same network with softmax attention on JapaneseVowels (nine
speakers say two vowels; who spoke?), measures both on test cases that training never saw, and draws one picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.cli.flags import parse
from primal_attention.train.config import OptimConfig, TrainerConfig, require, to_plain
from primal_attention.train.uea import AugmentConfig, ClassifierConfig, UEAData, UEARecipe

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn


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
        trainer=TrainerConfig(
            epochs=epochs, batch_size=32, ema=0.99, evaluate_every=epochs, accelerator="cpu", tensorboard=False
        ),
    )


def main(args: Sequence[str]) -> int:
    arguments = parse(DemoArguments, args, prog="primal demo", about=ABOUT)
    from rich.console import Console

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
    picture = draw_figure(arguments.out / "demo.png", seconds, sigma)
    show(console, results, seconds)
    console.print(f"picture: {picture}", soft_wrap=True)
    return 0


def run(recipe: UEARecipe, out: Path) -> tuple[Result, list[float]]:
    """Train one network; its line of the table and its singular values."""
    from primal_attention.train import folder as run_folder
    from primal_attention.train import runner
    from primal_attention.train.batches import Batches

    experiment = runner.build(recipe)
    before = mean_objective(experiment.module.model, experiment.train)
    place = run_folder.fresh(out / recipe.label())
    summary = runner.train(recipe, place, name=f"demo/{recipe.label()}")
    model = experiment.module.final_model
    runner.load_weights(model, place / "model.safetensors")
    after = mean_objective(model, experiment.train)
    x, mask, _ = next(iter(Batches(experiment.test.tensors, batch_size=64)))
    series = [case[~padding] for case, padding in zip(x, mask, strict=True)]
    values = singular_values(model, series, SINGULAR_VALUES)
    accuracy, seconds = summary["scores"]["last"]["accuracy"], summary["seconds_per_epoch"]
    return Result(recipe.label(), accuracy, seconds, summary["parameters"], before, after), values


def time_both(max_length: int) -> dict[str, dict[int, float]]:
    """Both attentions at growing lengths on this machine, with a bar."""
    from rich.progress import Progress

    lengths = [n for n in LENGTHS if n <= max_length]
    with Progress() as progress:
        task = progress.add_task("timing sequences of growing length", total=2 * len(lengths))
        return time_lengths(
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


def mean_objective(model: nn.Module, batches: Iterable[Any]) -> float | None:
    """Mean J over a data set without dropout, or None for a model without Primal layers."""
    import torch

    from primal_attention.nn.objective import primal_layers

    layers = list(primal_layers(model).values())
    if not layers:
        return None
    was_training, total, samples = model.training, 0.0, 0
    model.eval()
    for layer in layers:  # layers keep J in training mode; dropout stays off
        layer.train()
    with torch.no_grad():
        for x, mask, *_ in batches:
            model(x, mask)
            objectives = [float(layer.objective.float().mean()) for layer in layers if layer.objective is not None]
            total += sum(objectives) / len(layers) * len(x)
            samples += len(x)
    model.train(was_training)
    return total / samples


def singular_values(model: nn.Module, series: Iterable[Tensor], count: int) -> list[float]:
    """σ_i / σ_1 of the attention matrices for i ≤ count, mean over layers, heads and the series of that length."""
    import torch

    from primal_attention.convert.spectrum import spectrum

    layers = spectrum(model, [(x.unsqueeze(0),) for x in series if len(x) >= count], dtype=torch.float64).values()
    sigma = torch.cat([layer.singular_values[..., :count].flatten(0, 1) for layer in layers])
    return (sigma / sigma[:, :1].clamp(min=1e-300)).mean(dim=0).tolist()


def time_lengths(
    attentions: Mapping[str, Mapping[str, Any]],
    lengths: Sequence[int],
    *,
    embed_dim: int,
    num_heads: int,
    limit: float = 2.0,
    step: Callable[[], object] = lambda: None,
) -> dict[str, dict[int, float]]:
    """Seconds of forward and backward of one layer on one sequence, the best of some calls, by attention and length.

    An attention that has taken more than `limit` seconds is not timed on longer sequences.
    """
    import torch

    from primal_attention.nn.baselines import make_attention

    seconds: dict[str, dict[int, float]] = {name: {} for name in attentions}
    for name, keywords in attentions.items():
        layer = make_attention(name, embed_dim, num_heads, **keywords)
        for n in lengths:
            if max(seconds[name].values(), default=0.0) < limit:
                x = torch.randn(1, n, embed_dim, requires_grad=True)
                times: list[float] = []
                while len(times) < 2 or (sum(times) < 0.5 and len(times) < 20):
                    start = time.perf_counter()
                    layer(x).sum().backward()
                    times.append(time.perf_counter() - start)
                seconds[name][n] = min(times)
            step()
    return seconds


def draw_figure(file: Path, seconds: Mapping[str, Mapping[int, float]], sigma: Mapping[str, Sequence[float]]) -> Path:
    """Draw time against length and the decay of the singular values as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from primal_attention.utils.files import write_atomically

    colours, names = {"primal": "#c2410c", "softmax": "#1d4ed8"}, {"primal": "Primal-Attention", "softmax": "softmax"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.0), layout="constrained")
    figure.suptitle("Primal-Attention and softmax attention, JapaneseVowels")
    for name in sigma:
        style: dict[str, Any] = {"color": colours.get(name), "label": names.get(name, name)}
        lengths = sorted(seconds[name])
        left.loglog(lengths, [1e3 * seconds[name][n] for n in lengths], "o-", **style)
        shown = [value for value in sigma[name] if value > 1e-6]  # smaller values are rounding of zero
        right.semilogy(range(1, len(shown) + 1), shown, "o-", markersize=4, **style)
    ticks = sorted({n for points in seconds.values() for n in points})
    left.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
    left.minorticks_off()
    left.set(xlabel="sequence length N (tokens)", ylabel="forward + backward of one layer (ms)")
    left.set_title("Time on this machine, one CPU thread", fontsize=11)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="index i", ylabel="σᵢ / σ₁ (mean over layers and heads)")
    right.set_title("Singular values of the trained attention", fontsize=11)
    for axis in (left, right):
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    write_atomically(file, lambda stream: figure.savefig(stream, format="png", dpi=150))
    plt.close(figure)
    return file
