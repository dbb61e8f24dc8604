"""`primal export RUN FILE.onnx`: write the model of a finished run as an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from primal_attention.cli.flags import Parser
from primal_attention.utils.errors import DataError, RunError, import_package
from primal_attention.utils.pretrained import pretrained_path

ABOUT = """The file runs in onnxruntime without torch. Classifiers of series take raw series and a padding mask of any
batch size and length. Language models take tokens and the state before them, and return logits and the state after
them; the state is zero before the first token."""


def main(args: Sequence[str]) -> int:
    parser = Parser("export", "runs/uea/JapaneseVowels/primal-seed0 model.onnx", ABOUT)
    source = "folder of a run of uea or lm, or of save_pretrained, or the name of an included language model"
    parser.flag("run", source, type=Path, metavar="RUN")
    parser.flag("file", "the ONNX file to write", type=Path, metavar="FILE")
    options = parser.parse_args(args)
    if options.file.suffix != ".onnx":
        raise RunError(f"FILE must end in .onnx (got {options.file})")
    run, file = pretrained_path(options.run), options.file
    from primal_attention.train.checkpoint import read_run, read_summary

    if not (is_language := (run / "config.json").exists()):  # of save_pretrained
        read_summary(run)
        is_language = read_run(run)[1].benchmark == "lm"
    for package in ("onnx", "onnxscript"):
        import_package(package, "primal export")
    try:
        print((export_language_model if is_language else export_classifier)(run, file))
    except (RunError, DataError, OSError):
        raise
    except Exception as error:  # the exporter raises many kinds for an operator that it does not know
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise RunError(f"{run} cannot be exported: {(str(cause).splitlines() or ['?'])[0]}") from error
    print(f"written: {file}")
    return 0


def export_classifier(run: Path, file: Path) -> str:
    """Write a classifier behind the standardisation of its training set, and describe its inputs."""
    import torch

    from primal_attention.cli.spectrum import load_experiment
    from primal_attention.models.export import Standardized, export_onnx

    experiment = load_experiment(run, ("uea", "lm"), "primal export")
    standardizer = experiment.standardizer
    channels = len(standardizer.mean)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1, 3] = True
    inputs = {"x": torch.zeros(2, 4, channels), "key_padding_mask": mask}
    statistics = standardizer.mean, standardizer.std, getattr(standardizer, "basis", None)
    export_onnx(Standardized(experiment.module.final_model, *statistics), file, inputs, ["logits"])
    return f"inputs: x (batch, length, {channels}), key_padding_mask (batch, length), True at padding; output: logits"


def export_language_model(run: Path, file: Path) -> str:
    """Write a language model with its state as inputs and outputs, and describe them."""
    import torch

    from primal_attention.cli.generate import load_model
    from primal_attention.models.export import export_streaming

    model, _ = load_model(run)
    parts = export_streaming(model, file, torch.zeros(2, 3, dtype=torch.int64))
    return f"inputs: tokens and {len(parts)} parts of the state (state.…); outputs: output (logits) and next.…"
