"""`primal demo`: Primal-Attention on real data in about two minutes.

Trains a small PrimalFormer with the KSVD objective and the same network with softmax attention on JapaneseVowels (nine
speakers say two vowels; the class is the speaker), measures both on the test set and draws one figure.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.cli.flags import Parser, positive
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_json

if TYPE_CHECKING:
    from primal_attention.train.config import Recipe

INTRODUCTION = """JapaneseVowels: 270 recordings for training, 370 for testing, nine speakers.
Two networks that differ in their attention only:
  primal   Primal-Attention: linear in the length, with the KSVD objective J
  softmax  softmax attention: quadratic in the length
"""
EXPLANATION = """
The test set was measured once, after the last epoch. J is the KSVD objective of
an epoch. It is zero where a layer solves the singular value decomposition of its
kernel, and training reduces it. These series are too short to need a fast
attention. At {longest:,} tokens a Primal layer is {factor:.1f} times as fast as a softmax
layer on this machine (left half of the figure)."""
LENGTHS = tuple(2**k for k in range(7, 15))
NETWORKS = {"sdpa": "softmax", "primal-cpu": "primal"}  # by the name in the benchmark
TIMING = shlex.split("attention --device cpu --widths 64:4 --batch 1 --rank 16 --landmarks 26 --only sdpa primal-cpu")
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


def main(args: Sequence[str]) -> int:
    parser = Parser("demo", "--out runs/demo")
    out = "folder of the runs, demo.json and demo.png (default %(default)s)"
    parser.flag("--out", out, type=Path, default=Path("runs/demo"))
    parser.flag("--epochs", "epochs of training (default 40)", type=positive, default=40)
    longest = "longest sequence that is timed (default %(default)s)"
    parser.flag("--max-length", longest, type=positive, default=LENGTHS[-1])
    options = parser.parse_args(args)
    if options.max_length < LENGTHS[0]:
        raise RunError(f"--max-length must be at least {LENGTHS[0]} (got {options.max_length})")
    import torch

    from primal_attention.bench import attention
    from primal_attention.cli import bench
    from primal_attention.train import registry
    from primal_attention.train.config import override
    from primal_attention.utils.provenance import collect

    print(INTRODUCTION)
    torch.set_num_threads(1)  # the networks are small, and one thread is disturbed least by other programs
    base = override(registry.get("uea-modern/JapaneseVowels"), SETTINGS)
    epochs = {"trainer.epochs": options.epochs, "trainer.evaluate_every": options.epochs}
    settings = [{**epochs, "model.attention": (name,)} for name in NETWORKS.values()]
    results = [run(override(base, changes), options.out) for changes in settings]
    sigma = {result["attention"]: result.pop("sigma") for result in results}
    (data_sha256,) = {result.pop("data_sha256") for result in results}
    wall, cpu = time.perf_counter(), time.process_time()
    lengths = [str(n) for n in LENGTHS if n <= options.max_length]
    flags = bench.read_flags([*TIMING, "--lengths", *lengths, "--out", str(options.out)])
    flags.seconds = 0.2
    report = attention.run_attention(flags)
    rows = [{**row, "name": NETWORKS[row["name"]]} for row in report["rows"] if row["status"] == "ok"]
    cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    seconds = {name: {row["length"]: row["seconds"] for row in rows if row["name"] == name} for name in sigma}
    numbers = {"results": results, "seconds": seconds, "singular_values": sigma, "cpu_share": cpu_share}
    command = shlex.join(["primal", "demo", *args])
    origin = collect(command=command, device=torch.device("cpu"), data_sha256=data_sha256)
    write_json(options.out / "demo.json", {**numbers, **origin})
    draw_figure(options.out / "demo", rows, sigma)
    show(results, seconds)
    if cpu_share < MIN_CPU_SHARE:
        print(f"Other programs disturbed the timing: it got {cpu_share:.0%} of a core. Run it again.")
    print(f"figure: {options.out / 'demo.png'}")
    return 0


def run(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Train one network; return its row of the table and its singular values."""
    import torch

    from primal_attention.cli.spectrum import load_run
    from primal_attention.convert.spectrum import spectrum
    from primal_attention.train import checkpoint, loop

    folder = checkpoint.unused_folder(out / recipe.label())
    summary = loop.train(recipe, folder, name=f"demo/{recipe.label()}")
    model, batches = load_run(folder, samples=64, batch_size=1)
    # σ_i / σ_1 for i ≤ SINGULAR_VALUES, mean over layers, heads and the series of at least that length.
    inputs = [(x, mask) for x, mask in batches if int((~mask).sum()) >= SINGULAR_VALUES]
    layers = spectrum(model, inputs, dtype=torch.float64).values()
    sigma = torch.cat([layer.singular_values[..., :SINGULAR_VALUES].flatten(0, 1) for layer in layers])
    return {
        "attention": recipe.label(),
        "accuracy": summary["scores"]["last"]["accuracy"],
        "seconds_per_epoch": summary["seconds_per_epoch"],
        "parameters": summary["parameters"],
        "objective": summary["objective"],
        "data_sha256": summary["data"]["sha256"],
        "sigma": (sigma / sigma[:, :1].clamp(min=1e-300)).mean(dim=0).tolist(),
    }


def show(results: Sequence[dict[str, Any]], seconds: dict[str, dict[int, float]]) -> None:
    """Print a row per network, and what the numbers mean."""
    form = "{:<9}  {:>13}  {:>14}  {:>10}  {:>7}  {:>6}"
    print(form.format("attention", "test accuracy", "time per epoch", "parameters", "first J", "last J"))
    for row in results:
        objective = ["–", "–"] if row["objective"] is None else [f"{j:+.3f}" for j in row["objective"].values()]
        numbers = (f"{100 * row['accuracy']:.1f} %", f"{row['seconds_per_epoch']:.2f} s", f"{row['parameters']:,}")
        print(form.format(row["attention"], *numbers, *objective))
    longest = max(set(seconds["primal"]) & set(seconds["softmax"]))
    factor = seconds["softmax"][longest] / seconds["primal"][longest]
    print(EXPLANATION.format(longest=longest, factor=factor))


def draw_figure(file: Path, rows: Sequence[dict[str, Any]], sigma: dict[str, Sequence[float]]) -> None:
    """Draw time against length and the decay of the singular values."""
    from primal_attention.utils.figures import draw_lengths, new_figure

    with new_figure(file, 1, 2) as (figure, ((left, right),)):
        figure.suptitle("Primal-Attention and softmax attention, JapaneseVowels")
        draw_lengths(left, rows, "seconds", "forward + backward", "s")
        left.set_title("Time of one layer on one CPU thread")
        left.legend(frameon=False)
        for name, values in sigma.items():
            shown = [value for value in values if value > 1e-6]  # smaller values are rounding of zero
            right.semilogy(range(1, len(shown) + 1), shown, "o-", label=name)
        right.yaxis.set_major_formatter(lambda x, _: f"{x:.6f}".rstrip("0").rstrip("."))
        right.xaxis.get_major_locator().set_params(integer=True)
        right.set(xlabel="index i", ylabel="σᵢ / σ₁, mean over layers and heads", title="Trained singular values")
        right.legend(frameon=False)
