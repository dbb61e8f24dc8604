"""Tables of the documents, generated from `results/` and from the tests.

A document names its tables between comments, `<!-- table: NAME -->` and `<!-- end -->`. NAME is a key of `TABLES` or a
`primal table …` command. `docs/check.py --write` writes them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from primal_attention.report.results import Difference, read_benchmark, read_summaries

ROOT = Path(__file__).resolve().parent.parent
# Rows of the support table: the name in `@pytest.mark.supports`, and its title.
FEATURES = {
    "training": "forward, backward, KSVD loss",
    "autocast": "autocast (float16, bfloat16)",
    "compile": "`torch.compile(fullgraph=True)`, dynamic shapes",
    "export": "`torch.export`",
    "ONNX": "ONNX",
    "checkpointing": "activation checkpointing",
    "PEFT": "LoRA adapters (PEFT)",
    "quantisation": "quantised weights (tensor subclasses)",
    "DDP": "DDP",
    "FSDP2": "FSDP2",
    "context parallelism": "context parallelism",
}
DEVICES = {"cpu": "CPU", "cuda": "CUDA"}
GENERATED = {
    "sdpa": "softmax (KV cache)",
    "primal-mean": "Primal, mean",
    "primal-decay": "Primal, decay + conv + gate",
    "primal-delta": "Primal, delta + conv + gate",
}


def make_table(name: str) -> str:
    """The Markdown of a table."""
    return TABLES[name]() + "\n" if name in TABLES else run_table(name, "markdown")


def run_table(command: str, form: str) -> str:
    """The text that `primal table …` writes for stored results, as Markdown or CSV."""
    from primal_attention.cli import table

    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            arguments = shlex.split(command.removeprefix("primal table "))
            table.main([*arguments, "--no-run", f"--{form}", f"{folder}/table"])
            return Path(folder, "table").read_text(encoding="utf-8")
    finally:
        os.chdir(before)


def read_table(command: str) -> pd.DataFrame:
    """The unrounded numbers of `primal table …` for stored results."""
    return pd.read_csv(io.StringIO(run_table(command, "csv")))


def read_json(path: str) -> Any:
    """The content of a stored file that is neither a run nor a table: a benchmark, or a file of a script."""
    file = ROOT / "results" / path
    return read_benchmark(file) if path.startswith("bench/") else json.loads(file.read_text(encoding="utf-8"))


def render(heading: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = (), left: int = 1) -> str:
    """A Markdown table; columns after the first `left` are aligned to the right."""
    rule = ["---"] * left + ["--:"] * (len(heading) - left)
    lines = [f"| {' | '.join(row)} |" for row in [heading, *rows]]
    lines.insert(1, f"|{'|'.join(rule)}|")
    return "\n".join([*lines, *([""] if notes else []), *(f"- {note}" for note in notes)])


# Support


def read_marks() -> dict[tuple[str, str], list[str]]:
    """Test files by (feature, device), from the `supports` marks of the tests."""
    marks: dict[tuple[str, str], list[str]] = {}
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.supports":
                    feature, device = map(ast.literal_eval, mark.args)
                    files = marks.setdefault((feature, device), [])
                    files += [str(file.relative_to(ROOT))] if str(file.relative_to(ROOT)) not in files else []
    return marks


def support_table() -> str:
    marks = read_marks()
    unknown = [mark for mark in marks if mark[0] not in FEATURES or mark[1] not in DEVICES]
    if unknown:
        raise ValueError(f"marks of tests that the table does not know: {unknown}")

    def cell(feature: str, device: str) -> str:
        files = marks.get((feature, device))
        return ", ".join(f"[tested]({file})" for file in files) if files else "untested"

    rows = [[title, *(cell(feature, device) for device in DEVICES)] for feature, title in FEATURES.items()]
    return render(["feature", *DEVICES.values()], rows, left=3)


# Classifiers


def classifier_row() -> list[str]:
    """The README's row about PrimalClassifier, over the sets that all classifiers of the row accept."""
    names = ["primal", "softmax", "multirocket-hydra"]
    frame = read_table(f"primal table uea-modern --models {' '.join(names)}")
    accuracy = frame.pivot(index="dataset", columns="model", values="accuracy_mean").dropna()
    primal, softmax, rocket = accuracy.mean()[names]
    seconds = frame.groupby("model")["fit_seconds_mean"].agg(["median", "count"])
    (own, count), (other, _) = seconds.loc[["primal", "multirocket-hydra"]].to_numpy().tolist()
    return [
        f"time-series classifier, mean accuracy over {len(accuracy)} UEA sets",
        f"{primal:.1f} % (`PrimalClassifier`, fit {own:.0f} s on a CPU, median over {count:.0f} of the sets)",
        f"{softmax:.1f} % with softmax instead (MultiRocketHydra of aeon: {rocket:.1f} %, {other:.0f} s)",
        "`PrimalClassifier` with either; MultiRocketHydra for the fastest fit",
    ]


# Speed


def model_table() -> str:
    """Pairs of SDPA and Primal rows of the stored training steps of whole models."""
    stored = read_json("bench/model.json")
    by_name = {(row["name"], row["model"]): row for row in stored["rows"]}
    rows = []
    for name in (row["model"] for row in stored["rows"] if row["name"] == "primal"):
        sdpa, primal = by_name["sdpa", name], by_name["primal", name]
        model = name.removesuffix(f"-{primal['mode']}-{primal['dtype']}")
        times = [f"{1e3 * sdpa['seconds']:.1f}", f"{1e3 * primal['seconds']:.1f}"]
        ratios = [f"{1 / primal['speedup']:.2f}", f"{primal['peak_ratio']:.2f}"]
        rows.append([model, primal["mode"], primal["dtype"], *times, *ratios])
    heading = ["model", "mode", "precision", "SDPA ms", "Primal ms", "time ratio", "peak memory ratio"]
    return render(heading, rows, origin(stored, "bench/model.json"), left=3)


def group_by_shape(stored: Mapping[str, Any]) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """Rows of a stored benchmark of layers by (width, tokens) and name."""
    shapes: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in stored["rows"]:
        shapes.setdefault((row["embed_dim"], row["length"]), {})[row["name"]] = row
    return shapes


def layer_cells(by_name: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Times of the named rows of a layer, and the ratios of the fused kernels to SDPA."""
    primal = by_name["primal-fused"]
    times = [f"{1e3 * by_name[name]['seconds']:.2f}" for name in names]
    return [*times, f"{primal['speedup']:#.3g}", f"{primal['peak_ratio']:.2f}", f"{primal['saved_ratio']:.2f}"]


def layer_table() -> str:
    """SDPA with its backends and the fused kernels on one layer."""
    stored = read_json("bench/attention.json")
    names = ("sdpa", "sdpa-flash", "sdpa-cudnn", "primal-fused")
    shapes = group_by_shape(stored)
    rows = [[f"{width}", f"{n:,}", *layer_cells(by_name, names)] for (width, n), by_name in shapes.items()]
    heading = ["width", "tokens", "SDPA ms", "SDPA, flash ms", "SDPA, cuDNN ms", "Primal ms"]
    heading += ["speedup over SDPA", "peak memory ratio", "saved for backward ratio"]
    return render(heading, rows, origin(stored, "bench/attention.json"), left=0)


def causal_table() -> str:
    """SDPA and the fused kernels on one layer of each causal mode."""
    files = {mode: read_json(f"bench/attention-causal-{mode}.json") for mode in ("mean", "decay", "landmarks")}
    rows = [
        [mode, f"{length:,}", *layer_cells(by_name, ("sdpa", "primal-fused"))]
        for mode, stored in files.items()
        for (_, length), by_name in group_by_shape(stored).items()
    ]
    heading = ["mode", "tokens", "SDPA ms", "Primal ms", "speedup", "peak memory ratio", "saved for backward ratio"]
    return render(heading, rows, [group_note(files.values(), "bench/attention-causal-*.json")])


def eager_table() -> str:
    """SDPA and the fused kernels on one eager layer, in training and inference."""
    names = [
        f"bench/attention-eager-{part}{width}.json" for width in (384, 768, 128, 512) for part in ("", "inference-")
    ]
    files = [read_json(name) for name in names]
    rows = []
    for pair in zip(files[::2], files[1::2], strict=True):
        cells = []
        for stored in pair:
            ((shape, by_name),) = group_by_shape(stored).items()
            sdpa, primal = (1e3 * by_name[name]["seconds"] for name in ("sdpa", "primal-fused"))
            cells += [f"{sdpa:.2f}", f"{primal:.2f}", f"{primal / sdpa:.2f}"]
        rows.append([f"{by_name['sdpa']['batch']}", f"{shape[1]:,}", f"{shape[0]}", *cells])
    heading = ["sequences", "tokens", "width", "training: SDPA ms", "Primal ms", "time ratio"]
    heading += ["inference: SDPA ms", "Primal ms", "time ratio"]
    return render(heading, rows, [group_note(files, "bench/attention-eager-*.json")], left=0)


def cpu_table() -> str:
    """SDPA, the authors' implementation and the backends of Primal-Attention on one layer on a CPU."""
    stored = read_json("bench/attention-cpu.json")
    times = {(row["length"], row["name"]): row["seconds"] for row in stored["rows"]}
    backend = {row["length"]: row for row in stored["rows"] if row["name"] == "primal-cpu"}
    names = ("sdpa", "published", "primal-reference", "primal-compiled", "primal-cpu")
    rows = []
    for length, row in backend.items():
        speedups = [f"{times[length, base] / row['seconds']:.1f}" for base in ("sdpa", "published")]
        columns = [*(f"{1e3 * times[length, name]:,.0f}" for name in names), *speedups, f"{row['saved_ratio']:.2f}"]
        rows.append([f"{length:,}", *columns])
    heading = ["tokens", "SDPA ms", "authors ms", "equations ms", "compiled ms", "CPU backend ms"]
    heading += ["speedup over SDPA", "speedup over authors", "saved for backward ratio"]
    return render(heading, rows, origin(stored, "bench/attention-cpu.json"), left=0)


def read_accuracies(folder: str, model: str, score: str = "last") -> dict[int, float]:
    """Accuracy in per cent by seed of the stored runs of a model in a folder."""
    runs = [run for run in read_summaries(ROOT / "results" / folder) if run.path.stem == f"{model}-seed{run.seed}"]
    return {run.seed: 100 * run.scores[score]["accuracy"] for run in runs if score in run.scores}


def difference_table(folder: str, sets: Sequence[str], scores: Sequence[str]) -> str:
    """Accuracy minus that of softmax attention, paired over the seeds, with its 95 % interval."""
    rows = []
    for name in sets:
        for model in ("primal", "primal+"):
            for score in scores:
                accuracies, softmax = (read_accuracies(f"{folder}/{name}", m, score) for m in (model, "softmax"))
                difference = Difference.between(accuracies, softmax)
                assert difference is not None
                assert difference.half_interval is not None
                is_clear = abs(difference.mean) > difference.half_interval
                sign = ("ahead" if difference.mean > 0 else "behind") if is_clear else ""
                label = score.replace("_", "-").upper()
                rows.append([name, model, label, difference.show(), str(difference.seeds), sign])
    heading = ["set", "model", "column", "points, 95 % interval", "seeds", "beyond the interval"]
    return render(heading, rows, [f"`results/{folder}`: the runs of the table above."], left=3)


def control_table() -> str:
    """PrimalClassifier minus its controls, paired over the seeds, with 95 % intervals."""
    folder, controls = "uea-modern-classifiers", {"primal-eta0": "η = 0", "softmax": "softmax", "none": "no attention"}
    sets = sorted(place.name for place in (ROOT / "results" / folder).iterdir())
    by_model = {m: {name: read_accuracies(f"{folder}/{name}", m) for name in sets} for m in ("primal", *controls)}
    sets = [name for name in sets if all(by_set[name] for by_set in by_model.values())]

    def difference(model: str, names: Sequence[str]) -> str:
        """Of the mean over the sets, for the seeds that all of them have."""
        pair = by_model["primal"], by_model[model]
        seeds = set.intersection(*(set(by_set[name]) for by_set in pair for name in names))
        own, other = ({seed: fmean(by_set[name][seed] for name in names) for seed in seeds} for by_set in pair)
        result = Difference.between(own, other)
        if result is None:
            return "–"
        mark = " \\*" if result.half_interval and abs(result.mean) > result.half_interval else ""
        return f"{result.show()} ({result.seeds}){mark}"

    rows = [[name, *(difference(model, [name]) for model in controls)] for name in sets]
    rows.append([f"mean of the {len(sets)} sets", *(difference(model, sets) for model in controls)])
    heading = ["PrimalClassifier minus the control, points (seeds)", *controls.values()]
    notes = ["\\*: beyond the interval.", f"`results/{folder}`: the fits of the table above."]
    return render(heading, rows, notes)


def unseen_table() -> str:
    """Area under the ROC curve for "the class is unknown", of two scores and their paired difference."""
    path = "uea-modern-uncertainty/test.json"
    stored = read_json(path)
    rows = []
    for name in dict.fromkeys(run["set"] for run in stored["runs"]):
        runs = [run for run in stored["runs"] if run["set"] == name]
        entropy, own = ({run["seed"]: 100 * run["auroc"][key] for run in runs} for key in ("entropy", "variance"))
        difference = Difference.between(own, entropy)
        assert difference is not None
        means = [f"{fmean(score.values()):.1f}" for score in (entropy, own)]
        rows.append([name, *means, difference.show(), str(difference.seeds)])
    heading = ["set", "entropy of `predict_proba`", "`predict_uncertainty`", "difference, 95 % interval", "seeds"]
    return render(heading, rows, origin(stored, path))


def generate_table(name: str) -> str:
    """Tokens per second of whole language models against the tokens read before, and the size of their state."""
    files = (f"bench/{name}.json", f"bench/{name}-64.json")
    reports = [read_json(path) for path in files]
    stored = [row for report in reports for row in report["rows"]]
    lengths = sorted({row["length"] for row in stored})
    rows = []
    for batch, name in dict.fromkeys((row["batch"], row["name"]) for row in stored):
        own = {row["length"]: row for row in stored if (row["batch"], row["name"]) == (batch, name)}
        speeds = [f"{own[n]['tokens_per_second']:,.0f}" if n in own else "–" for n in lengths]
        states = dict.fromkeys(f"{own[n]['state_bytes'] / 1e3:,.1f}" for n in (min(own), max(own)))
        rows.append([str(batch), GENERATED[name], *speeds, " → ".join(states)])
    names = [f"{n // 2**10}K" if n < 2**20 else f"{n // 2**20}M" for n in lengths]
    heading = ["sequences", "tokens per second after", *names, "state of a sequence, kB"]
    return render(heading, rows, [note for pair in zip(reports, files, strict=True) for note in origin(*pair)])


def origin(stored: Mapping[str, Any], path: str) -> list[str]:
    device = stored["hardware"].get("gpu") or stored["hardware"]["cpu"]
    command = re.sub(r" --(out|commit) \S+", "", stored["command"])
    return [f"Command: `{command}`", f"`results/{path}`; commit {stored['commit'][:7]}; device {device}."]


def group_note(files: Iterable[Mapping[str, Any]], pattern: str) -> str:
    """The origin of a table of several files."""
    parts = [(stored["commit"][:7], stored["hardware"]["gpu"]) for stored in files]
    commits, devices = (", ".join(dict.fromkeys(part)) for part in zip(*parts, strict=True))
    return f"`results/{pattern}`, each with its command; commit {commits}; device {devices}."


def objective_table() -> str:
    """Layers before and after trainings with several η: means over the layers, and over e and r."""
    rows, notes = [], []
    for file in sorted((ROOT / "results" / "objective").glob("*.json")):
        stored = read_json(f"objective/{file.name}")
        for curve in stored["curves"]:

            def change(*names: str, form: str, ends: Sequence[Any] = (curve["rows"][0], curve["rows"][-1])) -> str:
                means = [fmean(layer[n] for layer in row["layers"].values() for n in names) for row in ends]
                return " → ".join(f"{mean:{form}}" for mean in means)

            numbers = [
                change("J", form=".3g"),
                change("effective_rank_e", "effective_rank_r", form=".1f"),
                change("orthogonality_e", "orthogonality_r", form=".2f"),
                change("explained_1", form=".2f"),
            ]
            rows.append([stored["recipe"], f"{curve['eta']:g}", f"{curve['rows'][-1]['step']:,}", *numbers])
        notes += origin(stored, f"objective/{file.name}")
    heading = ["recipe", "η", "steps", "J", "effective rank", "mean \\|cosine\\|", "first direction of K"]
    return render(heading, rows, notes)


# Predicted scaling


def duration(seconds: float) -> str:
    """Three digits and the largest unit that gives a number of at least one."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size and not (unit == "min" and seconds < 120):
            return f"{seconds / size:#.3g} {unit}".replace(". ", " ")
    return f"{seconds * 1e6:#.3g} µs".replace(". ", " ")


def scaling_table() -> str:
    stored = read_json("scaling/scaling.json")
    rows = []
    for row in stored["predicted"]:
        if row["gpus"] not in (1, 2, 8, 32, 128, 512, 1024):
            continue
        parts = ("primal_compute", "primal_communication", "ring_compute", "ring_communication")
        rows.append([str(row["gpus"]), *(duration(row[part]) if row[part] else "–" for part in parts)])
    heading = ["GPUs", "Primal: computing", "Primal: communication", "softmax: computing"]
    notes = [f"Command: `{stored['command']}`", "`results/scaling/scaling.json`; times of one GPU: NVIDIA H200."]
    memory = f"Peak memory of training, measured: {stored['peak_bytes_per_token'] / 1e3:.1f} kB per token."
    return render([*heading, "ring attention: communication"], rows, [memory, *notes], left=0)


def link_table() -> str:
    stored = read_json("scaling/link_simulation.json")
    rows = []
    for kind in ("primal", "ring attention"):
        pairs = [(row["measured"], row["predicted"]) for row in stored["rows"] if row["kind"] == kind]
        ratios = sorted(100 * (measured / predicted - 1) for measured, predicted in pairs)
        differences = sorted(1e3 * (measured - predicted) for measured, predicted in pairs)
        span = [f"{ratios[0]:+.1f} % to {ratios[-1]:+.1f} %", f"{differences[0]:.0f} to {differences[-1]:.0f} ms"]
        rows.append([kind, *span])
    notes = origin(stored, "scaling/link_simulation.json")
    return render(["algorithm", "measured over predicted", "measured − predicted"], rows, notes)


# Distillation and choices


def distillation_table() -> str:
    stored = read_json("convert/distill-minilm.json")
    rows = []
    for name, fit in stored["fits"].items():
        cosines = [f"{fit[part]['cosine']:.3f}" if part in fit else "–" for part in ("started", "after_blocks")]
        if "steps of the control" in name:  # begins from the weights of the first row
            first = next(iter(stored["fits"].values()))
            cosines = [f"{first[part]['cosine']:.3f}" for part in ("started", "after_blocks")]
        after = fit["after"]
        scores = [f"{after[score]:.3f}" for score in ("cosine", "cosine_5th_percentile", "top10")]
        steps = f"{fit['cut_off_after']} of {fit['end_steps']}" if "cut_off_after" in fit else f"{fit['end_steps']:,}"
        rows.append([name, *cosines, *scores, f"{steps} × {fit['batch']}"])
    heading = ["fit", "start", "block by block", "end to end", "5 % quantile", "top-10 overlap", "steps × batch"]
    commits = ", ".join(dict.fromkeys(fit["commit"] for fit in stored["fits"].values()))
    texts = f"{stored['texts']:,} training and {stored['held_out']:,} validation paragraphs of 32 to 128 tokens."
    notes = [texts, f"`results/convert/distill-minilm.json`; commits {commits}; device {stored['device']}."]
    return render(heading, rows, notes)


def call_table() -> str:
    stored = read_json("convert/distill-minilm.json")["speed_of_calls"]
    times = {(row["tokens"], row["model"]): row["ms"] for row in stored["rows"] if row["dtype"] == "torch.bfloat16"}
    models = ("original", "last layer", "all layers")
    lengths = sorted({tokens for tokens, _ in times})
    rows = [[f"{n:,}", *(f"{times[n, model]:.1f}" for model in models)] for n in lengths]
    notes = [f"`results/convert/distill-minilm.json`; commit {stored['commit']}; device {stored['device']}."]
    return render(["tokens of a text", *models], rows, notes, left=0)


def epoch_table() -> str:
    """Spread of the test accuracy over the epochs within one validation sample of the best."""
    stored = read_json("uea-chooser/Handwriting.json")
    margin = 1.0 / stored["held_out_cases"] + 1e-9
    spreads = []
    for run in stored["runs"].values():
        least = max(run["validation"]) - margin
        near = [test for score, test in zip(run["validation"], run["test"], strict=True) if score >= least]
        spreads.append(100 * (max(near) - min(near)))
    row = [str(len(spreads)), f"{sum(spreads) / len(spreads):.1f}", f"{max(spreads):.1f}"]
    notes = [f"Command: `{stored['command']}`"]
    notes += [f"`results/uea-chooser/Handwriting.json`; commit {stored['commit']}; device {stored['device']}."]
    return render(["runs", "mean difference", "largest difference"], [row], notes, left=0)


def recipe_table() -> str:
    stored = read_json("uea-modern-choice/held_out.json")["later"]
    sets = ("NATOPS", "JapaneseVowels", "Handwriting", "UWaveGestureLibrary")
    titles = {"model.differences": "differences", "data.principal": "principal directions"}
    rows = []
    for variant in stored["variants"]:
        if "changes" not in variant:  # a change that the recipe has no flag for
            continue
        changes = " and ".join(titles.get(key, f"{key} {value}") for key, value in variant["changes"].items()) or "none"
        changes += " (chosen)" if variant["changes"] == stored["chosen"] else ""
        rows.append([changes, *(f"{variant[s]['held_out_accuracy']:.1f}" if s in variant else "–" for s in sets)])
    notes = [f"`results/uea-modern-choice/held_out.json`; commit {stored['commit']}; device: {stored['device']}."]
    return render(["changes of the recipe", *sets], rows, notes)


# The README's overview


def situation_table() -> str:
    """Tasks, measured numbers of the stored results, and the choice that follows."""
    steps = {(row["model"], row["name"]): 1e3 * row["seconds"] for row in read_json("bench/model.json")["rows"]}
    state = {r["name"]: r["state_bytes"] for r in read_json("bench/generate.json")["rows"] if r["length"] == 2**20}
    ((_, layers),) = group_by_shape(read_json("bench/attention-eager-384.json")).items()
    command = "primal table lm --models softmax delta hybrid --set model.initializer_range=none"
    bits = read_column(command, "bits_per_byte_mean")
    pairs = read_column("primal table lm --models softmax softmax-local delta --seeds 2", "bits_per_byte_mean")
    runs = {run.path.name.removesuffix("-seed0.json"): run for run in read_summaries(ROOT / "results" / "lm-short")}
    names = ("primal-mean", "primal-decay", "softmax", "linear")
    quick = {name: runs[name].score("last", "bits_per_byte") for name in names}
    short = "primal table lra --recipe lra-short --any-length --sets listops text image pathfinder"
    lra = read_column(f"{short} --models softmax primal primal+ nystrom", "validation_chosen_mean")
    image = read_column("primal table image --set trainer.epochs=12", "validation_chosen_mean")
    mean, delta, cache = state["primal-mean"] / 1e3, state["primal-delta"] / 1e3, state["sdpa"] / 1e9

    def compare(situation: str, primal: float, sdpa: float) -> list[str]:
        slower = "softmax, or compile" if "eager" in situation else "softmax"
        choice = "either" if abs(primal / sdpa - 1) < 0.02 else "Primal" if primal < sdpa else slower
        return [situation, f"{primal:.1f} ms", f"{sdpa:.1f} ms", choice]

    def step(situation: str, name: str) -> list[str]:
        return compare(situation, *(steps[f"{name}-autocast", kind] for kind in ("primal", "sdpa")))

    rows = [
        step("training step, 8,192 tokens, compiled", "768x8192-compile"),
        step("training step, 1,024 tokens, compiled", "512x1024-compile"),
        step("training step, 1,024 tokens, eager", "512x1024-eager"),
        step("training step, 197 tokens, eager", "vit-eager"),
        compare(
            "training step of one layer, 197 tokens, width 384, eager",
            *(1e3 * layers[name]["seconds"] for name in ("primal-fused", "sdpa")),
        ),
        [
            "decoding state of a 2-layer model after 1M tokens",
            f"{mean:.1f} kB; {delta:.1f} kB with the delta rule",
            f"{cache:.1f} GB",
            "Primal",
        ],
        [
            "language model, bits per byte (lower is better, two seeds)",
            f"{pairs['delta']:.3f}; {bits['hybrid']:.3f} with one softmax layer in three (one seed)",
            f"{pairs['softmax']:.3f}; {pairs['softmax-local']:.3f} with the same convolution and gate",
            "softmax with both, or the hybrid",
        ],
        [
            "the same after a quarter of the text, the paper's causal mode",
            f"{quick['primal-mean']:.3f}; {quick['primal-decay']:.3f} with decay",
            f"{quick['softmax']:.3f} (linear attention: {quick['linear']:.3f})",
            "softmax",
        ],
        [
            "Long-Range Arena, mean accuracy of four tasks, short runs",
            f"{lra['primal']:.1f} %; {lra['primal+']:.1f} % in the last layer only",
            f"{lra['softmax']:.1f} % (Nyströmformer: {lra['nystrom']:.1f} %, one seed)",
            "Primal in the last layer, softmax or Nyströmformer",
        ],
        [
            "Imagenette accuracy, 197 tokens, 12 epochs",
            f"{image['primal+']:.1f} % in the last layer only",
            f"{image['softmax']:.1f} %",
            "Primal in the last layer",
        ],
        [
            "UEA time series and offline reinforcement learning",
            "the same within the noise of the seeds",
            "the same",
            "either",
        ],
        classifier_row(),
        ["cross-attention, arbitrary masks, attention weights", "not supported", "supported", "softmax"],
    ]
    return render(["task", "Primal-Attention", "softmax attention (SDPA)", "choose"], rows, left=4)


def read_column(command: str, column: str) -> Mapping[str, float]:
    """A column of a table by model, averaged over the sets."""
    return read_table(command).groupby("model")[column].mean()


TABLES: dict[str, Callable[[], str]] = {
    "support": support_table,
    "situations": situation_table,
    "bench model": model_table,
    "bench layer": layer_table,
    "bench causal": causal_table,
    "bench eager": eager_table,
    "bench cpu": cpu_table,
    "uea differences": lambda: difference_table(
        "uea", ["JapaneseVowels", "UWaveGestureLibrary", "Handwriting"], ["last", "validation_chosen"]
    ),
    "lra differences": lambda: difference_table(
        "lra-short", ["listops", "text", "image", "pathfinder"], ["validation_chosen"]
    ),
    "classifier controls": control_table,
    "unseen classes": unseen_table,
    "bench generate": lambda: generate_table("generate"),
    "bench generate gpu": lambda: generate_table("generate-gpu"),
    "objective effect": objective_table,
    "scaling": scaling_table,
    "link simulation": link_table,
    "distillation": distillation_table,
    "distillation calls": call_table,
    "recipe changes": recipe_table,
    "epoch choice": epoch_table,
}
