"""`primal export RUN FILE.onnx`: write the model of a finished run as an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primal_attention.cli.flags import Parser
from primal_attention.utils.errors import DataError, RunError, import_package

ABOUT = """Write the model of a finished run as an ONNX file, which runs in onnxruntime without torch. Runs of uea take
raw series and a padding mask of any batch size and length. Runs of lm take tokens and the state before them, and
return logits and the state after them; the state is zero before the first token."""
EXAMPLE = "Example: primal export runs/uea/JapaneseVowels/primal-seed0 model.onnx"


def main(args: Sequence[str]) -> int:
    parser = Parser(prog="primal export", description=ABOUT, epilog=EXAMPLE)
    add: Any = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run of uea or lm")
    add("file", type=Path, metavar="FILE", help="the ONNX file to write")
    add("--single", action="store_true", help="lm: one token per call, for a smaller and faster graph")
    options = parser.parse_args(list(args))
    run, file = options.run, options.file
    if file.suffix != ".onnx":
        raise RunError(f"FILE must end in .onnx (got {file})")
    from primal_attention.train.checkpoint import read_run, read_summary

    read_summary(run)
    _, recipe = read_run(run)
    writers: dict[str, Any] = {"uea": export_classifier, "lm": export_language_model}
    if recipe.benchmark not in writers:
        raise RunError(f"{run} is a run of {recipe.benchmark}: primal export knows {' and '.join(writers)}")
    if options.single and recipe.benchmark != "lm":
        raise RunError(f"--single is for runs of lm, and {run} is a run of {recipe.benchmark}")
    for package in ("onnx", "onnxscript"):
        import_package(package, "primal export")
    try:
        print(writers[recipe.benchmark](run, file, **({"single": True} if options.single else {})))
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

    from primal_attention.models.export import Standardized, export_onnx
    from primal_attention.train import checkpoint, loop
    from primal_attention.train.config import override

    _, recipe = checkpoint.read_run(run)
    (_, phase), *_ = recipe.phases()
    experiment = loop.build(override(phase, {"trainer.compile": "off"}))
    model = experiment.module.final_model
    loop.load_weights(model, run / "model.safetensors")
    assert experiment.standardizer is not None
    channels = len(experiment.standardizer.mean)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1, 3] = True
    inputs = {"x": torch.zeros(2, 4, channels), "key_padding_mask": mask}
    statistics = [getattr(experiment.standardizer, name, None) for name in ("mean", "std", "basis")]
    export_onnx(Standardized(model, *statistics), file, inputs, ["logits"])
    return f"inputs: x (batch, length, {channels}), key_padding_mask (batch, length), True at padding; output: logits"


def export_language_model(run: Path, file: Path, single: bool = False) -> str:
    """Write a language model with its state as inputs and outputs, and describe them."""
    import torch

    from primal_attention.models.export import export_streaming
    from primal_attention.train.lm import load_language

    model, _ = load_language(run)
    parts = export_streaming(model, file, torch.zeros(2, 3, dtype=torch.int64), single=single)
    return f"inputs: tokens and {len(parts)} parts of the state (state.…); outputs: output (logits) and next.…"
