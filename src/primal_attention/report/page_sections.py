"""The sections about runs: accuracies, results, learning curves, and every run with its command and configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from primal_attention.report import charts
from primal_attention.report.charts import Bar, BarGroup, Series
from primal_attention.report.page_blocks import Cell, legend, mean, note, number, panel, panels, section, spread, table
from primal_attention.report.page_groups import PROTOCOLS, Group, Palette, by_task, flat
from primal_attention.report.page_numbers import number_at
from primal_attention.report.page_runs import Run
from primal_attention.train.checkpoint import Table

MIB = 1024**2


def names_of(groups: Iterable[Group], palette: Palette) -> dict[str, int]:
    return {one.name: palette[one.name] for one in groups}


def accuracy(groups: Sequence[Group], palette: Palette) -> str:
    """Bars from zero and, beside them, the same numbers from close by."""
    drawn = []
    for title, members in by_task(groups).items():
        found = [bar_group(one, palette) for one in members]
        values = [v for g in found for b in g.bars for v in (*b.values, b.value - (b.error or 0.0))]
        if not values:
            continue
        marks = [g.mark for g in found if g.mark is not None]
        low = max(0.0, 100.0 - 1.12 * (100.0 - min([*values, *marks])))
        low = min(low, 98.0)  # a scale of a few tenths would blow up noise
        cards = [panel("Test accuracy", charts.bars(found, title=title, low=0.0, high=100.0))]
        if low > 20:
            closer = charts.bars(found, title=f"{title}, closer", low=low, high=100.0)
            cards.append(panel("The same, closer", closer))
        cards.append(panel("Seconds per epoch", epoch_chart(members, title, palette)))
        drawn.append(panels(cards, title))
    if not drawn:
        return section("accuracy", "Accuracy", "", note("None of these runs has finished."))
    key = (
        '<ul class="key"><li><i class="full"></i>LAST epoch</li>'
        '<li><i class="half"></i>VALIDATION-CHOSEN: held-out training cases chose the epoch</li>'
        '<li><i class="open"></i>BEST ON TEST: the test set chose the epoch</li>'
        '<li><i class="diamond"></i>the paper’s number</li></ul>'
    )
    lead = (
        "Test accuracy in percent, mean over seeds; whiskers are one standard deviation. The paper’s numbers are one "
        "seed each and the best epoch on test: BEST ON TEST is what compares with them."
    )
    return section("accuracy", "Accuracy", lead, legend(names_of(groups, palette)) + key + "".join(drawn))


def bar_group(one: Group, palette: Palette) -> BarGroup:
    found = []
    for key, title, style in PROTOCOLS:
        value = one.accuracy(key)
        if value is not None:
            found.append(Bar(value.mean, value.deviation, value.values, style, title))
    return BarGroup(one.name, found, palette[one.name], one.name, one.paper)


def epoch_chart(members: Sequence[Group], title: str, palette: Palette) -> str:
    found = []
    for one in members:
        value = one.fact("seconds_per_epoch")
        if value is not None:
            bar = Bar(value.mean, value.deviation, value.values, "full", "seconds per epoch")
            found.append(BarGroup(one.name, [bar], palette[one.name], one.name, form="{:.2f}"))
    high = max((bar.value + (bar.error or 0.0) for g in found for bar in g.bars), default=0.0)
    return charts.bars(found, title=f"{title}, seconds per epoch", low=0.0, high=1.02 * high, unit="s") if high else ""


def results(groups: Sequence[Group]) -> str:
    """One row per variant."""
    headings = ["Set", "Recipe", "Model", "Seeds", "LAST", "VALIDATION-CHOSEN", "CHOSEN, RETRAINED", "BEST ON TEST",
                "Paper", "Parameters", "s per epoch", "Peak MiB", "J first", "J last", "Device"]  # fmt: skip
    rows = []
    for one in groups:
        runs = one.once()
        if not runs:
            continue
        devices = sorted({str(run.summary.get("device") or "") for run in runs})
        memory = one.fact("peak_memory_bytes")
        rows.append(
            [
                Cell(one.task),
                Cell(one.recipe.removesuffix(f"/{one.task}")),
                Cell(one.name),
                number(len(runs), "{:.0f}"),
                spread(one.accuracy("last")),
                spread(one.accuracy("validation_chosen")),
                spread(one.accuracy("validation_chosen", "retrained_accuracy")),
                spread(one.accuracy("best_on_test")),
                number(one.paper),
                mean(one.fact("parameters"), "{:,.0f}"),
                mean(one.fact("seconds_per_epoch"), "{:.2f}"),
                number(memory.mean / MIB if memory else None, "{:,.0f}"),
                mean(one.fact("objective", "first"), "{:+.3f}"),
                mean(one.fact("objective", "last"), "{:+.3f}"),
                Cell(", ".join(devices)),
            ]
        )
    if not rows:
        return ""
    lead = "One row per variant, over its seeds. A click on a heading sorts."
    return section("results", "Results", lead, table("Test accuracy (%) and cost by variant", headings, rows))


CURVES = (
    ("task_loss", "metrics", "Task loss", "loss on training batches"),
    ("J", "metrics", "KSVD objective J", "J on training batches"),
    ("test_accuracy", "metrics", "Test accuracy", "% of test cases"),
    ("test_loss", "metrics", "Test loss", "loss on test cases"),
    ("val_accuracy", "validation", "Held-out accuracy", "% of held-out training cases"),
    ("lr", "metrics", "Learning rate", "after the epoch"),
)


def learning(groups: Sequence[Group], palette: Palette) -> str:
    """Curves per run, coloured by variant."""
    drawn = []
    for title, members in by_task(groups).items():
        cards = []
        for column, part, name, axis in CURVES:
            lines = [line for one in members for run in one.runs if (line := curve(run, one, part, column, palette))]
            if all(len(line.x) < 2 for line in lines):  # measured once, at the end: no curve
                continue
            if column == "lr" and all(len(set(line.y)) == 1 for line in lines):
                continue
            values = [v for line in lines for v in line.y if v is not None and v > 0]
            # A loss that falls through orders of magnitude is a flat line on a linear axis.
            wide = column.endswith("loss") and bool(values) and max(values) > 30 * min(values)
            chart = charts.lines(lines, title=f"{title}, {name}", x_name="epoch", y_name=axis, y_log=wide)
            cards.append(panel(name, chart))
        drawn.append(panels(cards, title))
    if not any(drawn):
        return section("learning", "Learning curves", "", note("Result files hold no curves: give the run folders."))
    lead = (
        "One line per run. J is the KSVD objective of the Primal layers: zero where they solve the singular value "
        "decomposition of their kernel. A tap or the pointer on a line reads it."
    )
    return section("learning", "Learning curves", lead, legend(names_of(groups, palette)) + "".join(drawn))


def curve(run: Run, one: Group, part: str, column: str, palette: Palette) -> Series | None:
    found: Table = run.metrics if part == "metrics" else run.validation
    if column == "val_accuracy" and column in run.metrics:  # a run of the validation protocol alone
        found = run.metrics
    if column not in found or "epoch" not in found:
        return None
    factor = 100.0 if column.endswith("accuracy") else 1.0
    values = [None if v is None else factor * v for v in found[column]]
    pairs = [(e, v) for e, v in zip(found["epoch"], values, strict=True) if v is not None]  # not measured every epoch
    label = f"{one.name}, seed {run.seed}"
    return Series(label, [e for e, _ in pairs], [v for _, v in pairs], palette[one.name], one.name)


def every_run(groups: Sequence[Group]) -> str:
    """A table of all runs, and below it the command and the configuration of each."""
    headings = ["Run", "Set", "Model", "Seed", "Epochs", *(title for _, title, _ in PROTOCOLS), "s per epoch", "State"]
    rows: list[list[Cell]] = []
    details: list[str] = []
    for one in groups:
        for run in one.runs:
            name = f"run-{len(details) + 1}"
            epochs = float(len(run.metrics.get("epoch", []))) or number_at(run.summary, ["epochs"])
            rows.append(
                [
                    Cell(f'<a href="#{name}">{escape(run.place)}</a>', run.place, safe=True),
                    Cell(one.task),
                    Cell(one.name),
                    number(run.seed, "{:.0f}"),
                    number(epochs, "{:.0f}"),
                    *(number(run.accuracy(key)) for key, _, _ in PROTOCOLS),
                    number(number_at(run.summary, ["seconds_per_epoch"]), "{:.2f}"),
                    Cell("finished" if run.finished else "not finished"),
                ]
            )
            details.append(run_details(name, run, one))
    lead = "Single runs, and below the table the command and the whole configuration of each."
    content = table("All runs", headings, rows) + f'<div class="runs">{"".join(details)}</div>'
    return section("runs", "Every run", lead, content)


FACTS = ("device", "torch", "version", "parameters", "primal_layers")


def run_details(name: str, run: Run, one: Group) -> str:
    facts = [(key, run.summary[key]) for key in FACTS if run.summary.get(key) is not None]
    facts += [("commit", run.commit)] if run.commit else []
    facts += flat(run.summary.get("data") or {}, "data.")
    listed = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>" for key, value in facts)
    command = (
        f'<div class="command"><code>{escape(run.command)}</code><button type="button" data-copy>copy</button></div>'
        if run.command
        else note("Started from Python; no command was recorded.")
    )
    if run.config is None:
        config = note("A result file does not hold the configuration: give the run folder.")
    else:
        text = "\n".join(f"{key}: {value}" for key, value in flat(run.config))
        config = f'<pre tabindex="0" aria-label="configuration of {escape(run.place)}">{escape(text)}</pre>'
    state = "" if run.finished else ' <span class="badge">not finished</span>'
    return (
        f'<details id="{name}"><summary><b>{escape(one.name)}</b> seed {run.seed} · {escape(one.task)}{state}'
        f'<span class="place">{escape(run.place)}</span></summary>{command}<dl>{listed}</dl>{config}</details>'
    )
