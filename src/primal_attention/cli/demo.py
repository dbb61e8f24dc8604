"""`primal demo`: Primal-Attention on real data in about two minutes.

Trains a small PrimalFormer with the KSVD objective and the same network with softmax attention on JapaneseVowels (nine
speakers say two vowels; the class is the speaker), measures both on the test set and draws one figure.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.cli.flags import parse
from primal_attention.utils.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from primal_attention.train.config import Recipe

ABOUT = """Train a small PrimalFormer and the same network with softmax attention on real data, about two minutes.

Example: primal demo --out runs/demo"""
INTRODUCTION = """[bold]JapaneseVowels[/]: 270 recordings for training, 370 for testing, 12 channels, 7 to 29 steps, \
nine speakers to tell apart.
Two networks that differ in their attention only:
  [bold]primal[/]   Primal-Attention: linear in the length, trained with the KSVD objective J
  [bold]softmax[/]  softmax attention: quadratic in the length
"""
LENGTHS = tuple(2**k for k in range(7, 15))
LAYERS: dict[str, dict[str, int]] = {"softmax": {}, "primal": {"rank": 16, "landmarks": 26}}
SINGULAR_VALUES = 20
MIN_CPU_SHARE = 0.8  # of the wall time, below which other programs disturb the timing
SETTINGS: dict[str, Any] = {
    "data.principal": False,
    "model.embed_dim": 64,
    "model.num_heads": 4,
    "model.layers": 2,
    "model.ffn_dim": 128,
    "model.dropout": 0.1,
    "model.landmarks": 26,
    "model.local_kernel": 7,
    "augment.warp": 0.0,
    "trainer.accelerator": "cpu",
}


@dataclass(frozen=True)
class Arguments:
    out: Path = Path("runs/demo")
    """Folder of the two runs, the numbers (demo.json) and the figure (demo.png)."""
    epochs: int = 40
    seed: int = 0
    max_length: int = LENGTHS[-1]
    """Longest sequence that is timed."""


def main(args: Sequence[str]) -> int:
    options = parse(Arguments, args, prog="primal demo", about=ABOUT)
    if options.epochs < 1:
        raise RunError(f"--epochs must be at least 1 (got {options.epochs})")
    if options.max_length < LENGTHS[0]:
        raise RunError(f"--max-length must be at least {LENGTHS[0]} (got {options.max_length})")
    import torch
    from rich.console import Console

    from primal_attention.train import registry
    from primal_attention.train.config import override
    from primal_attention.utils.files import write_json
    from primal_attention.utils.progress import Progress
    from primal_attention.utils.provenance import collect

    console = Console(highlight=False)
    console.print(INTRODUCTION)
    torch.set_num_threads(1)  # the networks are small, and one thread is disturbed least by other programs
    base = override(registry.get("uea-modern/JapaneseVowels"), {**SETTINGS, "seed": options.seed})
    epochs = {"trainer.epochs": options.epochs, "trainer.evaluate_every": options.epochs}
    results = []
    for name in ("primal", "softmax"):
        results.append(run(override(base, {**epochs, "model.attention": (name,)}), options.out))
    lengths = [n for n in LENGTHS if n <= options.max_length]
    wall, cpu = time.perf_counter(), time.process_time()
    with Progress(2 * len(lengths), "timing sequences of growing length") as progress:
        seconds = time_lengths(LAYERS, lengths, embed_dim=64, num_heads=4, step=progress.advance)
    cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    numbers: dict[str, Any] = {
        "results": [{key: value for key, value in result.items() if key != "sigma"} for result in results],
        "seconds": {name: {str(n): s for n, s in points.items()} for name, points in seconds.items()},
        "singular_values": {result["attention"]: result["sigma"] for result in results},
        "cpu_share": cpu_share,
    }
    origin = collect(command=shlex.join(["primal", "demo", *args]), device=torch.device("cpu"))
    write_json(options.out / "demo.json", {**numbers, **origin})
    figure = draw_figure(options.out / "demo.png", seconds, numbers["singular_values"])
    show(console, results, seconds)
    if cpu_share < MIN_CPU_SHARE:
        console.print(f"[bold]Other programs disturbed the timing[/]: it got {cpu_share:.0%} of a core. Run it again.")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


def run(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Train one network; return its row of the table and its singular values."""
    from primal_attention.train import checkpoint, loop
    from primal_attention.train.batches import Batches

    experiment = loop.build(recipe)
    before = mean_objective(experiment.module.model, experiment.train)
    folder = checkpoint.unused_folder(out / recipe.label())
    summary = loop.train(recipe, folder, name=f"demo/{recipe.label()}")
    model = experiment.module.final_model
    loop.load_weights(model, folder / "model.safetensors")
    x, mask, _ = next(iter(Batches(experiment.test.tensors, batch_size=64)))
    series = [sample[~padding] for sample, padding in zip(x, mask, strict=True)]
    return {
        "attention": recipe.label(),
        "accuracy": summary["scores"]["last"]["accuracy"],
        "seconds_per_epoch": summary["seconds_per_epoch"],
        "parameters": summary["parameters"],
        "j_before": before,
        "j_after": mean_objective(model, experiment.train),
        "sigma": singular_values(model, series, SINGULAR_VALUES),
    }


def show(console: Any, results: Sequence[Mapping[str, Any]], seconds: Mapping[str, Mapping[int, float]]) -> None:
    from rich.table import Table

    table = Table("attention", title="The same network and training, two attentions")
    for heading in ("test accuracy", "time per epoch", "parameters", "J before", "J after"):
        table.add_column(heading, justify="right")
    for row in results:
        objective = ["–" if j is None else f"{j:+.3f}" for j in (row["j_before"], row["j_after"])]
        measured = (f"{100 * row['accuracy']:.1f} %", f"{row['seconds_per_epoch']:.2f} s", f"{row['parameters']:,}")
        table.add_row(row["attention"], *measured, *objective)
    console.print(table)
    longest = max(set(seconds["primal"]) & set(seconds["softmax"]))
    factor = seconds["softmax"][longest] / seconds["primal"][longest]
    console.print(
        "The test set was measured once, after the last epoch. J is the KSVD objective. It is zero where a layer "
        "solves the singular value decomposition of its kernel, and training reduces it.\n"
        f"These series are too short to need a fast attention. At {longest:,} tokens a Primal layer is {factor:.0f} "
        "times as fast as a softmax layer on this machine (left half of the figure)."
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
