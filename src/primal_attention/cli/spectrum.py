"""`primal spectrum`: singular values of the attention matrices of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.cli.flags import DEVICE, Parser, positive, read_device
from primal_attention.utils.errors import RunError
from primal_attention.utils.figures import new_figure
from primal_attention.utils.files import write_csv
from primal_attention.utils.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from primal_attention.convert.spectrum import Spectrum

ABOUT = """Each layer and head on the test set of a run: effective ranks as a table, all values as NAME.csv, and the
paper's four panels as NAME.png and NAME.svg. Several runs are drawn into one picture. In Python,
primal_attention.spectrum(model, inputs) does the same for other models."""
CLASSIFIERS = ("uea", "lra", "image")  # whose attention sees the whole input
BATCH_SIZE = 16
EXPLAINED = 0.999  # directions beyond this share are not drawn


def main(args: Sequence[str]) -> int:
    parser = Parser("spectrum", "runs/uea/JapaneseVowels/primal-seed0", ABOUT)
    parser.flag("runs", "folder of a run of uea, lra or image", nargs="+", type=Path, metavar="RUN")
    parser.flag("--samples", "number of test samples (default 64)", type=positive, default=64)
    parser.flag("--out", "folder (default results/spectrum)", type=Path, default=Path("results/spectrum"))
    parser.flag("--name", "name of the files in the folder (default spectrum)", default="spectrum")
    parser.flag("--device", DEVICE, type=str)
    options = parser.parse_args(args)
    from primal_attention.convert.spectrum import spectrum
    from primal_attention.data.storage import one_line

    device = read_device(options.device)
    sources = {folder: load_run(folder, options.samples, BATCH_SIZE) for folder in options.runs}
    spectra: dict[str, Spectrum] = {}
    for folder, (model, batches) in sources.items():
        name = "/".join(folder.resolve().parts[-2:])
        label = f"{name} ({len(spectra) + 1})" if name in spectra else name
        with Progress(len(batches), label) as bar:
            try:
                spectra[label] = spectrum(model.to(device), batches, step=lambda: bar.advance(label))  # noqa: B023
            except (ValueError, RuntimeError) as error:  # for example a model without attention
                raise RunError(f"{label}: {one_line(error)}") from error
        print(f"{label}\n{spectra[label]}")
    file = options.out / options.name
    rows = [{"model": label, **row} for label, layers in spectra.items() for row in layers.rows()]
    write_csv(file.with_name(f"{file.name}.csv"), rows)
    draw_panels(file, spectra)
    print(f"written: {file}.csv, {file}.png, {file}.svg")
    return 0


def load_experiment(folder: Path, benchmarks: Sequence[str], command: str) -> Any:
    """Return the experiment of a run of one of the benchmarks, with the trained weights in its final model."""
    from primal_attention.train import checkpoint, loop
    from primal_attention.train.config import override

    _, recipe = checkpoint.read_run(folder)
    if recipe.benchmark not in benchmarks:
        raise RunError(f"{folder} is a run of {recipe.benchmark}: {command} supports {', '.join(benchmarks)}")
    (_, phase), *_ = recipe.phases()
    experiment = loop.build(override(phase, {"trainer.compile": "off"}))  # compiled blocks do not call hooks
    loop.load_weights(experiment.module.final_model, folder / "model.safetensors")
    return experiment


def load_run(folder: Path, samples: int, batch_size: int) -> tuple[nn.Module, list[Any]]:
    """Return the model of a run and batches of its test set."""
    experiment = load_experiment(folder, CLASSIFIERS, "primal spectrum")
    tests = experiment.test
    tests.batch_size, tests.shuffle_seed = batch_size, 0  # sets are often sorted by class
    batches: list[Any] = []
    for batch in tests:
        count = min(samples, int((batch[-1] >= 0).sum()))  # the last batch may be filled up
        batches.append(experiment.module.inputs(tuple(t[:count] for t in batch)))
        samples -= count
        if samples <= 0:
            break
    return experiment.module.final_model, batches


def draw_panels(file: Path, models: Mapping[str, Spectrum]) -> None:
    """Draw explained variance of shallow, middle and deep layers (the last one dashed), and the effective ranks."""
    curves = {label: [layer.curve()[0] for layer in layers.values()] for label, layers in models.items()}
    shown = max(10, *(int((curve < EXPLAINED).sum()) + 1 for layers in curves.values() for curve in layers))
    titles = ("(a) shallow layers", "(b) middle layers", "(c) deep layers", "(d) effective rank")
    with new_figure(file, 1, len(titles)) as (figure, (axes,)):
        figure.suptitle("Attention matrices: mean over heads and inputs")
        for number, (label, layers) in enumerate(models.items()):
            for i, curve in enumerate(curves[label]):
                mean, style = curve[:shown].numpy(), "--" if i == len(layers) - 1 else "-"
                axes[3 * i // len(layers)].plot(range(1, len(mean) + 1), mean, f"C{number}{style}")
            ranks = [float(layer.effective_rank.mean()) for layer in layers.values()]
            axes[3].plot(range(len(ranks)), ranks, f"C{number}o-", label=label)
        for axis, title in zip(axes, titles, strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel("layer" if axis is axes[3] else "directions")
        axes[0].set_ylabel("cumulative explained variance")
        axes[3].set_ylim(bottom=0)
        axes[3].xaxis.get_major_locator().set_params(integer=True)
        axes[3].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
