"""The report page: a jinja2 template with tables of runs and plotly charts. It loads nothing from a network."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import plotly.express as px
from markupsafe import Markup
from plotly.offline import get_plotlyjs

import primal_attention
from primal_attention.report.results import NOT_COMPARED, PROTOCOLS, Collection, Run, Stat
from primal_attention.report.tables import published
from primal_attention.train.config import flatten
from primal_attention.utils.files import write_text
from primal_attention.utils.provenance import device_name

SCRIPT = "plotly.min.js"
# Readable on light and dark ground. Primal-Attention is orange and softmax attention blue on the whole page.
COLOURS = ("#e8590c", "#3b82f6", "#d4a017", "#0d9488", "#8b5cf6", "#ec4899", "#65a30d", "#06b6d4", "#6366f1", "#b45309")
# The main score of a run with its title; for the first two the published table has the same name.
METRICS = {"accuracy": "Test accuracy (%)", "score": "Normalised score", "bits_per_byte": "Test bits per byte"}
CURVES = {
    "task_loss": "Task loss",
    "J": "KSVD objective J",
    "test_accuracy": "Test accuracy",
    "test_loss": "Test loss",
    "val_accuracy": "Validation accuracy",
    "lr": "Learning rate",
}
SMALLEST = 1e-6  # a relative singular value below this is the rounding of a zero


@dataclass(frozen=True)
class Group:
    """The seeds of one variant of one recipe. `name` is the label and the settings in which variants differ."""

    task: str
    recipe: str
    label: str
    name: str
    runs: Sequence[Run]

    def finished(self) -> list[Run]:
        """One run per seed: a repeated seed is no further evidence."""
        return list({run.seed: run for run in reversed(self.runs) if run.scores}.values())[::-1]

    def score(self, protocol: str) -> Stat | None:
        return Stat.over(run.score(protocol, self.metric) for run in self.finished())

    @property
    def metric(self) -> str:
        names = {name for run in self.runs for score in run.scores.values() for name in score}
        return next((name for name in METRICS if name in names), "accuracy")

    @property
    def paper(self) -> float | None:
        label = "primal+" if self.label == "softmax-primal" else self.label
        return published(self.runs[0].benchmark, self.metric, self.task, label)


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Runs that differ in nothing but the seed, in the order of tasks and recipes, Primal-Attention first."""
    variants: dict[tuple[str, str, str], dict[tuple[tuple[str, str], ...], list[Run]]] = {}
    for run in runs:
        settings = tuple((name, str(value)) for name, value in flatten(run.settings) if name not in NOT_COMPARED)
        variants.setdefault((run.task, run.recipe, run.label), {}).setdefault(settings, []).append(run)
    groups = []
    for (task, recipe, label), by_settings in variants.items():
        tables = [dict(settings) for settings in by_settings if settings]
        fields = dict.fromkeys(name for table in tables for name in table)
        differing = [name for name in fields if len({table.get(name) for table in tables}) > 1]
        for settings, members in by_settings.items():
            values = [f"{name.rpartition('.')[2]} {value}" for name, value in settings if name in differing]
            name = f"{label} ({', '.join(values)})" if values else label
            groups.append(Group(task, recipe, label, name, sorted(members, key=lambda run: run.seed)))
    order = {"primal": 0, "primal+": 1, "softmax": 2}
    return sorted(groups, key=lambda group: (group.task.lower(), group.recipe, order.get(group.label, 3)))


def card(figure: Any, title: str) -> dict[str, str]:
    """A chart with its title, as JSON that is safe inside a script element."""
    figure.update_layout(legend_title="", legend_orientation="h", margin={"l": 8, "r": 12, "t": 8, "b": 8})
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return {"title": title, "json": Markup(figure.to_json().replace("<", "\\u003c"))}


def line_card(frame: pd.DataFrame, title: str, colours: Mapping[str, str], **options: Any) -> dict[str, str]:
    """Lines that are coloured by variant."""
    style = {"color": "variant", "color_discrete_map": colours, "markers": len(frame) <= 200, "template": "none"}
    figure = px.line(frame, **style, **options).update_layout(height=320, legend_y=-0.25)
    if options.get("log_x"):
        figure.update_xaxes(tickvals=sorted(frame["length"].unique().tolist()), tickformat=",d")
    return card(figure, title)


def score_charts(groups: Sequence[Group]) -> Iterator[Any]:
    """Test scores with one standard deviation beside the published number."""
    title, rows = METRICS[groups[0].metric], []
    for group in groups:
        stats = {heading: group.score(protocol) for protocol, heading in PROTOCOLS.items()}
        stats["paper"] = Stat.over([group.paper])
        name = escape(group.name)
        rows += [(name, protocol, stat.mean, stat.std or 0.0) for protocol, stat in stats.items() if stat]
    if not any(group.score(protocol) for group in groups for protocol in PROTOCOLS):
        return
    frame = pd.DataFrame(rows, columns=["variant", "protocol", title, "std"])
    symbols = {"LAST": "circle", "VALIDATION-CHOSEN": "square", "BEST-ON-TEST": "circle-open", "paper": "diamond-open"}
    by_protocol = dict(zip(symbols, (*COLOURS[:3], "#888"), strict=True))
    style = {"color": "protocol", "color_discrete_map": by_protocol, "symbol": "protocol", "symbol_map": symbols}
    dots = px.scatter(frame, x=title, y="variant", error_x="std", template="none", **style)
    dots.update_traces(marker_size=9, orientation="h").update_yaxes(autorange="reversed", title="")
    ends = [*(frame[title] - frame["std"]), *(frame[title] + frame["std"])]
    margin = 0.05 * (max(ends) - min(ends)) or 1.0
    dots.update_xaxes(range=[min(ends) - margin, max(ends) + margin])
    height = 150 + 42 * len(groups)
    dots.update_layout(height=height, legend_y=1.02, legend_yanchor="bottom", scattermode="group")
    yield card(dots, title)


def curve_charts(groups: Sequence[Group], colours: Mapping[str, str]) -> Iterator[Any]:
    """One chart per column of the metrics, one line per run."""
    for column, title in CURVES.items():
        parts = []
        for group in groups:
            for run in group.runs:
                table = run.metrics if column in run.metrics else run.validation
                frame = pd.DataFrame({key: table[key] for key in ("epoch", column) if key in table}, dtype=float)
                if {"epoch", column} <= set(frame.columns) and len(frame := frame.dropna()) > 1:
                    name = f"{escape(group.name)}, seed {run.seed}"
                    parts.append(frame.assign(variant=escape(group.name), run=name, path=str(run.path)))
        if parts and not (column == "lr" and all(part[column].nunique() == 1 for part in parts)):
            frame = pd.concat(parts)
            if column.endswith("accuracy"):
                title, frame[column] = f"{title} (%)", 100 * frame[column]
            values = frame[column][frame[column] > 0]
            # A loss that falls through orders of magnitude is a flat line on a linear axis.
            is_log = column.endswith("loss") and bool(len(values)) and values.max() > 30 * values.min()
            labels = {"labels": {column: title}, "hover_name": "run", "log_y": is_log}
            yield line_card(frame, title, colours, x="epoch", y=column, line_group="path", **labels)


def cost_charts(content: Collection, colours: Mapping[str, str]) -> Iterator[Any]:
    """Time and memory against length from benchmarks."""
    axes = {"x": "length", "log_x": True, "log_y": True}
    for _, bench in content.benches:
        frame = pd.DataFrame(bench["rows"]).query("status == 'ok' and seconds > 0")
        frame = frame.assign(variant=frame["label"].map(escape), ms=1e3 * frame["seconds"] / frame["batch"])
        kind = f"{bench['kind']}{', causal' if bench['settings'].get('causal') else ''}"
        # The batch of a layer depends on the length.
        panel = frame["batch"].map("batch {}".format) if bench["kind"] == "generate" else ""
        frame["panel"] = frame["embed_dim"].map("d {}, ".format) + frame["num_heads"].map("{} heads ".format) + panel
        for name, own in frame.sort_values("length").groupby("panel"):
            where = f"{kind}, {name}"
            yield line_card(own, f"Time · {where}", colours, y="ms", labels={"ms": "ms per sequence"}, **axes)
            for key in ("peak_bytes", "state_bytes", "saved_bytes"):
                if key in own and own[key].notna().any():
                    sizes = own.assign(MiB=own[key].astype(float) / 2**20)
                    label = {"MiB": f"MiB, {key.removesuffix('_bytes')}"}
                    yield line_card(sizes, f"Memory · {where}", colours, y="MiB", labels=label, **axes)
                    break


def cost_sources(content: Collection) -> Iterator[str]:
    """Where the costs were measured: the machine, its load before and the command."""
    for path, bench in content.benches:
        hardware = bench["hardware"]
        device = f"{device_name(hardware)}, load {hardware.get('load_before')} on {hardware['cores']} cores"
        yield f"{path}: {device}, {bench['settings']['dtype']}, {bench.get('command')}"


def spectrum_charts(groups: Sequence[Group], colours: Mapping[str, str]) -> Iterator[Any]:
    """Singular values relative to the largest, a chart per data set."""
    rows: dict[str, list[Any]] = {}
    for group in groups:
        for run in group.runs:
            for layer, values in run.spectrum.items():
                names = (escape(group.name), escape(f"{group.name}, seed {run.seed}, {layer}"))
                shown = [(*names, i, value) for i, value in enumerate(values, start=1) if value > SMALLEST]
                rows.setdefault(group.task, []).extend(shown)
    for task, own in rows.items():
        frame = pd.DataFrame(own, columns=["variant", "name", "index", "σᵢ / σ₁"])
        yield line_card(frame, task, colours, x="index", y="σᵢ / σ₁", line_group="name", log_y=True)


def write_page(file: Path, content: Collection, *, command: str = "", inline: bool = False) -> None:
    """Write the page as HTML, with plotly's script in it (`inline`) or beside it."""
    if not inline:
        write_text(file.parent / SCRIPT, get_plotlyjs())
    groups = group_runs(content.runs)
    fixed = {"primal": 0, "softmax": 1, "primal+": 2}
    names = [*fixed, *sorted({group.name for group in groups} - set(fixed))]
    colours = {escape(name): COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        tasks.setdefault(group.recipe if group.recipe.endswith(group.task) else group.task, []).append(group)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("page.html.j2")
    finished = [run for run in content.runs if run.scores]
    hours = sum(run.seconds_per_epoch * run.epochs for run in finished if run.epochs) / 3600
    facts = {
        "runs": len(content.runs),
        "not finished": len(content.runs) - len(finished),
        "data sets": len({run.task for run in content.runs}),
        "models": len({group.name for group in groups}),
        "benchmarks": len(content.benches),
        "hours of training": f"{hours:,.2f}" if hours else 0,
    }
    page = template.render(
        title="Primal-Attention runs",
        command=command,
        made=f"{datetime.date.today().isoformat()} by primal-attention {primal_attention.__version__}",
        script=Markup(get_plotlyjs()) if inline else None,
        script_file=SCRIPT,
        facts={name: value for name, value in facts.items() if value},
        scores={task: list(score_charts(own)) for task, own in tasks.items()},
        curves={task: list(curve_charts(own, colours)) for task, own in tasks.items()},
        costs=list(cost_charts(content, colours)),
        sources=list(cost_sources(content)),
        spectra=list(spectrum_charts(groups, colours)),
        groups=groups,
        finished=finished,
        flatten=flatten,
        broken=content.broken,
    )
    write_text(file, page)
