"""`primal demo`: Primal-Attention on real data in about two minutes.

Trains a small PrimalFormer with the KSVD objective and the same network with softmax attention on JapaneseVowels (nine
speakers say two vowels; the class is the speaker), measures both on the test set and draws one figure.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.cli.flags import parse
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_atomically, write_json
from primal_attention.utils.progress import Progress

if TYPE_CHECKING:
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
STYLES = {
    "primal": {"color": "#c2410c", "label": "Primal-Attention"},
    "softmax": {"color": "#1d4ed8", "label": "softmax"},
}
MAX_SECONDS = 2.0  # of a timed step; longer sequences are left out then
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
    from primal_attention.utils.provenance import collect

    console = Console(highlight=False)
    console.print(INTRODUCTION)
    torch.set_num_threads(1)  # the networks are small, and one thread is disturbed least by other programs
    base = override(registry.get("uea-modern/JapaneseVowels"), {**SETTINGS, "seed": options.seed})
    epochs = {"trainer.epochs": options.epochs, "trainer.evaluate_every": options.epochs}
    results = [run(override(base, {**epochs, "model.attention": (name,)}), options.out) for name in STYLES]
    wall, cpu = time.perf_counter(), time.process_time()
    seconds = time_lengths([n for n in LENGTHS if n <= options.max_length])
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
    import torch

    from primal_attention.convert.spectrum import spectrum
    from primal_attention.train import checkpoint, loop
    from primal_attention.train.batches import Batches

    folder = checkpoint.unused_folder(out / recipe.label())
    summary = loop.train(recipe, folder, name=f"demo/{recipe.label()}")
    experiment = loop.build(recipe)
    model = experiment.module.final_model
    loop.load_weights(model, folder / "model.safetensors")
    x, mask, _ = next(iter(Batches(experiment.test.tensors, batch_size=64)))
    series = [sample[~padding] for sample, padding in zip(x, mask, strict=True)]
    # σ_i / σ_1 for i ≤ SINGULAR_VALUES, mean over layers, heads and the series of at least that length.
    inputs = [(sample.unsqueeze(0),) for sample in series if len(sample) >= SINGULAR_VALUES]
    layers = spectrum(model, inputs, dtype=torch.float64).values()
    sigma = torch.cat([layer.singular_values[..., :SINGULAR_VALUES].flatten(0, 1) for layer in layers])
    return {
        "attention": recipe.label(),
        "accuracy": summary["scores"]["last"]["accuracy"],
        "seconds_per_epoch": summary["seconds_per_epoch"],
        "parameters": summary["parameters"],
        "objective": summary["objective"],
        "sigma": (sigma / sigma[:, :1].clamp(min=1e-300)).mean(dim=0).tolist(),
    }


def show(console: Any, results: Sequence[Mapping[str, Any]], seconds: Mapping[str, Mapping[int, float]]) -> None:
    from rich.table import Table

    table = Table("attention", title="The same network and training, two attentions")
    for heading in ("test accuracy", "time per epoch", "parameters", "first J", "last J"):
        table.add_column(heading, justify="right")
    for row in results:
        objective = ["–", "–"] if row["objective"] is None else [f"{j:+.3f}" for j in row["objective"].values()]
        measured = (f"{100 * row['accuracy']:.1f} %", f"{row['seconds_per_epoch']:.2f} s", f"{row['parameters']:,}")
        table.add_row(row["attention"], *measured, *objective)
    console.print(table)
    longest = max(set(seconds["primal"]) & set(seconds["softmax"]))
    factor = seconds["softmax"][longest] / seconds["primal"][longest]
    console.print(
        "The test set was measured once, after the last epoch. J is the KSVD objective of an epoch. It is zero where "
        "a layer solves the singular value decomposition of its kernel, and training reduces it.\n"
        f"These series are too short to need a fast attention. At {longest:,} tokens a Primal layer is {factor:.0f} "
        "times as fast as a softmax layer on this machine (left half of the figure)."
    )


def time_lengths(lengths: Sequence[int]) -> dict[str, dict[int, float]]:
    """Seconds of forward and backward of one layer on one sequence, the best of some calls, by attention and length."""
    import torch

    from primal_attention.nn.baselines import make_attention

    seconds: dict[str, dict[int, float]] = {name: {} for name in LAYERS}
    with Progress(len(LAYERS) * len(lengths), "timing sequences of growing length") as progress:
        for name, keywords in LAYERS.items():
            layer = make_attention(name, 64, 4, **keywords)
            for n in lengths:
                if max(seconds[name].values(), default=0.0) < MAX_SECONDS:
                    x = torch.randn(1, n, 64, requires_grad=True)
                    times: list[float] = []
                    while len(times) < 2 or (sum(times) < 0.5 and len(times) < 20):
                        start = time.perf_counter()
                        layer(x).sum().backward()
                        times.append(time.perf_counter() - start)
                    seconds[name][n] = min(times)
                progress.advance()
    return seconds


def draw_figure(file: Path, seconds: Mapping[str, Mapping[int, float]], sigma: Mapping[str, Sequence[float]]) -> Path:
    """Draw time against length and the decay of the singular values as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.0), layout="constrained")
    figure.suptitle("Primal-Attention and softmax attention, JapaneseVowels")
    for name in sigma:
        style: dict[str, Any] = STYLES[name]
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
