"""The tables of `primal table`: their grids, our numbers beside the published ones, and three ways to write them.

A table has cells (a variant on a set, with its runs) and columns (what is computed from a cell and how it is shown).
LAST, BEST-ON-TEST and VALIDATION-CHOSEN are always separate columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import pandas as pd

from primal_attention.nn.baselines import attention_names
from primal_attention.report.results import PROTOCOLS, Difference, Run, Stat
from primal_attention.train.grid import Variant
from primal_attention.utils.files import read_yaml, write_text

MISSING = "–"
AVERAGE = "Average"
GB = 1e-9
AUTHORS_CODE = "published"
"""Row of `lra-efficiency`: Primal-Attention as the authors' implementation computes it, on the same device."""

TIMED_FITS = "2 threads"  # seconds of fits with another number of threads are not shown
MAX_OTHER_CORES = 0.1  # cores of other processes, above which the seconds of a fit are not shown
CLASSIFIERS = {
    "primal": "PrimalClassifier",
    "multirocket-hydra": "MultiRocketHydra (aeon)",
    "primal-networks": "PrimalClassifier, networks alone",
    "primal-features": "PrimalClassifier, features alone",
    "primal-eta0": "PrimalClassifier, η = 0",
    "softmax": "softmax instead of Primal-Attention",
    "none": "convolution instead of attention",
    "inception-time": "InceptionTime (aeon)",
}
CLASSIFIER_SETS = (
    "ArticularyWordRecognition", "AtrialFibrillation", "BasicMotions", "FingerMovements", "Handwriting",
    "JapaneseVowels", "LSST", "NATOPS", "PenDigits", "StandWalkJump", "UWaveGestureLibrary",
)  # fmt: skip


@cache
def paper(benchmark: str) -> dict[str, Any]:
    """Published numbers: the content of paper/<benchmark>.yaml, with lists of numbers as dicts by column."""
    content = read_yaml(Path(__file__).parent / "paper" / f"{benchmark}.yaml")
    for table in content.values():
        if isinstance(table, dict) and "columns" in table:
            for part in ("rows", "deviations"):
                rows = table.get(part, {})
                table[part] = {name: dict(zip(table["columns"], row, strict=True)) for name, row in rows.items()}
            for part in ("average", "memory"):
                table[part] = dict(zip(table["columns"], table.get(part, ()), strict=part in table))
    return content


def published(benchmark: str, table: str, row: str, column: str) -> float | None:
    """A published number; None where there is none, also for a benchmark of one's own."""
    if benchmark not in ("uea", "lra", "d4rl", "lm", "image"):
        return None
    return paper(benchmark).get(table, {}).get("rows", {}).get(row, {}).get(column)


def source(benchmark: str, table: str) -> str:
    """A note on where the published numbers of a table come from."""
    about = paper(benchmark)[table]
    device = f", {about['device']}" if "device" in about else ""
    return f"Paper ({about['table']}{device}): {about['about']}."


@dataclass(frozen=True)
class Cell:
    """A variant on a set, or on several sets for an average row, with its runs by set."""

    benchmark: str
    dataset: str
    variant: Variant
    runs: Mapping[str, Sequence[Run]]
    base: Cell | None = None
    """The cell that this one is compared with, on the same sets."""

    @property
    def all_runs(self) -> list[Run]:
        return [run for runs in self.runs.values() for run in runs]

    @property
    def is_average(self) -> bool:
        return len(self.runs) > 1

    @property
    def has_scores(self) -> bool:
        return any(run.scores for run in self.all_runs)

    @property
    def title(self) -> str:
        model, titles = self.variant.model, paper(self.benchmark).get("models", {})
        if model == AUTHORS_CODE:
            return "PrimalFormer, the authors' implementation"
        if model == "none":
            return "no attention (none)"
        name = self.variant.name if self.variant.part == "models" else model
        return f"{titles[model]} ({name})" if model in titles else model

    @property
    def devices(self) -> set[str]:
        return {run.device for run in self.all_runs}

    def first(self, value: Callable[[Run], Any]) -> Any:
        return next((v for run in self.all_runs if (v := value(run)) is not None), None)

    @property
    def length(self) -> int | None:
        """The longest sequence of the set; None for an average."""
        return None if self.is_average else self.first(lambda run: run.data.get("max_length"))

    def by_seed(self, value: Callable[[Run], float | None]) -> dict[int, float]:
        """The mean over the sets for each seed that all sets have."""
        by_set = [{run.seed: v for run in runs if (v := value(run)) is not None} for runs in self.runs.values()]
        seeds = set.intersection(*(set(values) for values in by_set)) if by_set else set()
        return {seed: fmean(values[seed] for values in by_set) for seed in sorted(seeds)}

    def stat(self, value: Callable[[Run], float | None]) -> Stat | None:
        """Mean and deviation over the seeds."""
        return Stat.over(self.by_seed(value).values())

    def difference(self, value: Callable[[Cell, Run], float | None]) -> Difference | None:
        """The value of this cell minus that of its base, paired over the seeds."""
        if self.base is None or self.base.variant.name == self.variant.name:
            return None
        own, others = (cell.by_seed(lambda run: value(cell, run)) for cell in (self, self.base))  # noqa: B023
        return Difference.between(own, others)

    def score(self, protocol: str, name: str = "accuracy") -> Stat | None:
        return self.stat(lambda run: run.score(protocol, name))

    def peak(self) -> int | None:
        return max((run.peak_memory_bytes for run in self.all_runs if run.peak_memory_bytes), default=None)

    def paper(self, table: str) -> float | None:
        """The published number, or the mean of the numbers if there is one for every set."""
        values = [published(self.benchmark, table, name, self.variant.name) for name in self.runs]
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else None

    def ratio(self, value: Callable[[Cell], Any]) -> float | None:
        """The value of the base over this one, if both ran on one and the same device."""
        if self.base is None or len(self.devices | self.base.devices) != 1:
            return None
        theirs, mine = (v.mean if isinstance(v, Stat) else v for v in (value(self.base), value(self)))
        return theirs / mine if theirs and mine else None

    def seeds(self) -> str:
        """The number of seeds, or one number per protocol where they differ."""
        counts = [len({run.seed for run in self.all_runs if name in run.scores}) for name in PROTOCOLS]
        is_same = len(set(counts) - {0}) < 2
        return str(len({run.seed for run in self.all_runs})) if is_same else "/".join(map(str, counts))


def with_base(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of a part, each with the one that it is compared with on the same sets."""
    by_name = {(cell.dataset, cell.variant.name): cell for cell in cells}
    bases = [PARTS[cell.variant.part].base_of(cell.variant) for cell in cells]
    return [replace(cell, base=by_name.get((cell.dataset, base))) for cell, base in zip(cells, bases, strict=True)]


def average_cells(cells: Sequence[Cell]) -> list[Cell]:
    """A cell per variant with scores, over the sets on which all of them have scores; none if this is a single set."""
    runs = {(cell.variant.name, cell.dataset): cell.all_runs for cell in cells if cell.has_scores}
    variants = {cell.variant.name: cell for cell in cells if cell.has_scores}
    sets = [s for s in dict.fromkeys(cell.dataset for cell in cells) if all((name, s) in runs for name in variants)]
    if len(sets) < 2 or not runs:
        return []
    return [replace(c, dataset=AVERAGE, runs={s: runs[n, s] for s in sets}) for n, c in variants.items()]


@dataclass(frozen=True)
class Column:
    """A number or text that is computed from a cell: `key` in the CSV file, `heading` and format elsewhere."""

    heading: str
    key: str
    value: Callable[[Cell], Any]
    digits: int | None = None
    """None: text."""
    scale: float = 1.0
    form: str = "{}"
    is_optional: bool = False
    """Left out where no cell has a value."""

    def show(self, value: Any) -> str:
        if value is None:
            return MISSING
        if self.digits is None or isinstance(value, str):
            return str(value)
        if isinstance(value, Difference):
            return value.show(self.digits)
        stat = value if isinstance(value, Stat) else Stat(value, None, 1)
        std = None if stat.std is None else stat.std * self.scale
        return self.form.format(replace(stat, mean=stat.mean * self.scale, std=std).show(self.digits))


@dataclass(frozen=True)
class Section:
    """Cells and the columns that show them. The first column groups the rows."""

    title: str
    columns: Sequence[Column]
    cells: Sequence[Cell]

    def frame(self) -> pd.DataFrame:
        """The section as it is shown: text, each group's name once."""
        rows = [[column.show(column.value(cell)) for column in self.columns] for cell in self.cells]
        frame = pd.DataFrame(rows, columns=range(len(self.columns)))
        frame[0] = frame[0].mask(frame[0] == frame[0].shift(), "")
        return frame.rename(columns=dict(enumerate(column.heading for column in self.columns)))

    def numbers(self) -> pd.DataFrame:
        """The unrounded numbers of all cells but averages."""
        cells = [cell for cell in self.cells if not cell.is_average]
        columns: dict[str, list[Any]] = {
            "part": [cell.variant.part for cell in cells],
            "dataset": [cell.dataset for cell in cells],
            "model": [cell.variant.name for cell in cells],
        }
        for column in self.columns:
            values = [column.value(cell) for cell in cells]
            kind = next((type(value) for value in values if isinstance(value, (Stat, Difference))), None)
            if kind is not None:
                for name in (f.name for f in fields(kind)):
                    absent = 0 if name == "seeds" else None
                    columns[f"{column.key}_{name}"] = [getattr(value, name, absent) for value in values]
            else:
                columns[column.key] = values
        columns["device"] = ["; ".join(sorted(cell.devices)) for cell in cells]
        columns["commit"] = ["; ".join(sorted({run.commit or "unknown" for run in cell.all_runs})) for cell in cells]
        return pd.DataFrame(columns)


@dataclass(frozen=True)
class Table:
    """Sections and notes: where the numbers come from and how to read them."""

    title: str
    sections: Sequence[Section]
    notes: Sequence[str] = ()
    command: str = ""


def to_markdown(table: Table) -> str:
    """GitHub's tables under their titles, the notes as a list below."""
    lines = [f"**{table.title}**", ""]
    for section in table.sections:
        lines += [f"*{section.title}*", ""] if section.title else []
        rule = ["---" if column.digits is None else "--:" for column in section.columns]
        rows = [[c.heading for c in section.columns], *section.frame().to_numpy().tolist()]
        text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        lines += [text[0], "|" + "|".join(rule) + "|", *text[1:], ""]
    return "\n".join([*lines, *(f"- {note}" for note in table.notes), ""])


def to_terminal(table: Table) -> None:
    """Print a table with rich; in a terminal that is too narrow for its columns, as one paragraph per row."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    if not console.is_terminal:  # files and pipes get the full width: no number is cut
        console = Console(width=200)
    with console.capture() as text:
        console.print(Text(table.title, style="bold"))
        for section in table.sections:
            title = Text(section.title) if section.title else None
            grid, frame = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left"), section.frame()
            for i, column in enumerate(section.columns):
                is_text = column.digits is None
                words = " ".join(frame.iloc[:, i]).split() if is_text else frame.iloc[:, i]
                width = max(map(len, [*words, *column.heading.split()]))
                grid.add_column(column.heading, justify="left" if is_text else "right", min_width=width)
            for i, row in enumerate(frame.to_numpy().tolist()):
                if i and row[0]:
                    grid.add_section()
                grid.add_row(*map(Text, row))
            if Measurement.get(console, console.options.update(width=1000), grid).minimum <= console.width:
                console.print(grid)
                continue
            console.print(title or "")
            for cell in section.cells:
                facts = [(column.heading, column.show(column.value(cell))) for column in section.columns]
                shown = [f"{heading} {value}" for heading, value in facts if value not in ("", MISSING)]
                console.print(Text("; ".join(shown) + "\n"))
        for note in table.notes:
            console.print(Text(f"· {note}"), soft_wrap=True)
    print(text.get(), end="")  # not by rich, which ends the process with code 1 when the reader of a pipe has closed it


def to_csv(table: Table, file: Path) -> None:
    """Write the unrounded numbers, one row per set and variant."""
    frame = pd.concat([section.numbers() for section in table.sections])
    write_text(file, frame.assign(command=table.command).to_csv(index=False))


def make_table(kind: TableKind, title: str, cells: Sequence[Cell], command: str) -> Table:
    """The table of a kind from its cells."""
    sections, notes = [], list(kind.notes(cells))
    for part in dict.fromkeys(cell.variant.part for cell in cells):
        own = [cell for cell in cells if cell.variant.part == part]
        averages = average_cells(own) if kind.has_average else []
        if averages:
            theirs = "" if kind.source == "fits" else "; the paper's is the mean of its numbers on these sets"
            notes.append(f"{AVERAGE}: over {', '.join(averages[0].runs)}{theirs}.")
        columns = [c for c in kind.columns(own) if not c.is_optional or any(c.value(cell) is not None for cell in own)]
        sections.append(Section(PARTS[part].title, columns, with_base([*own, *averages])))
    runs = {(run.path, run.label): run for cell in cells for run in cell.all_runs}.values()
    commits, devices = Counter(short_commit(run.commit) for run in runs), Counter(run.device for run in runs)
    where = f"commit {_count(commits)}; device {_count(devices)}"
    notes += [f"Command: `{command}`", f"Runs: {len(runs)}; {where}. Each result file has its run's own command."]
    return Table(title, sections, list(dict.fromkeys(notes)), command)


def _count(names: Counter[str]) -> str:
    if len(names) < 2:
        return next(iter(names), MISSING)
    return ", ".join(f"{name} ({n} run{'s' if n > 1 else ''})" for name, n in names.most_common())


def short_commit(commit: str | None) -> str:
    """Twelve digits, and whether files differed from the commit."""
    digits, _, state = (commit or "unknown").partition("-")
    return digits[:12] + (f"-{state}" if state else "")


# Columns and notes

SET = Column("Set", "dataset", lambda cell: cell.dataset)
LENGTH = Column("Length", "max_length", lambda cell: cell.length, 0)
MODEL = Column("Model", "title", lambda cell: cell.title)
SEEDS = Column("Seeds", "seeds", Cell.seeds, 0)
SCORES = [Column(h, name, lambda cell, name=name: cell.score(name), 1) for name, h in PROTOCOLS.items()]  # type: ignore
PEAK = Column("Peak GB", "peak_bytes", Cell.peak, 2, GB)
LESS_MEMORY = Column("less than softmax", "times_less_memory", lambda c: c.ratio(Cell.peak), 2, form="{}×")
PEAK_NOTE = "Peak GB: the most that torch had allocated on the GPU during a training epoch, in 10⁹ bytes."
OURS = (
    "Ours: accuracy on test in per cent, mean ± standard deviation over the seeds. BEST-ON-TEST lets the test set "
    "choose the epoch and so is too high. LAST and VALIDATION-CHOSEN do not use the test set: for the second, holdout "
    "samples choose the epoch."
)


def option(heading: str, name: str) -> Column:
    """An option of the variant; the recipe's own value where the variant does not change it."""
    words = {True: "yes", False: "no", None: "the recipe's"}

    def show(cell: Cell) -> Any:
        value = cell.variant.options.get(name)
        return words[value] if value is None or isinstance(value, bool) else value

    return Column(heading, name, show)


class Part(NamedTuple):
    """A part of a table: its title, the columns that name its variants, and the variant that they are compared with."""

    title: str
    columns: Sequence[Column]
    base: str

    def base_of(self, variant: Variant) -> str:
        return self.base.format(model=variant.model, **variant.options)


PARTS = {
    "models": Part("", [MODEL], "softmax"),
    "classifiers": Part("", [replace(MODEL, value=lambda cell: CLASSIFIERS[cell.variant.name])], "multirocket-hydra"),
    "eta-s": Part(
        "Weight η and rank s of PrimalFormer", [option("s", "rank"), option("η", "eta")], "primal-s{rank}-eta0"
    ),
    "eta": Part("With and without the KSVD loss", [MODEL, option("η", "eta")], "{model}-eta0"),
    "data-dependence": Part(
        "Data-dependent projection weights, Primal.+Trans.",
        [option("Data-dependent", "data_dependent")],
        "primal+-independent",
    ),
    "r-scores": Part(
        "With and without r-scores in the output", [MODEL, option("r-scores", "r_scores")], "{model}-without-r"
    ),
    "rank": Part("Rank s of Primal.+DT", [option("s", "rank")], "primal+-s32"),
}


def rate(name: str) -> Callable[[Cell], Stat | None]:
    """How many of the things that a run counts per epoch it does in a second."""
    return lambda cell: cell.stat(lambda run: run.data[name] / run.seconds_per_epoch if run.data.get(name) else None)


def accuracy_columns(cells: Sequence[Cell]) -> list[Column]:
    """Published and own accuracies; ablations also have the differences to their base."""
    part, benchmark = cells[0].variant.part, cells[0].benchmark
    table = "accuracy" if part == "models" else part
    chosen = "best on test" if benchmark == "uea" else "validation-chosen"
    theirs = Column(f"Paper ({chosen})", "paper", lambda cell: cell.paper(table), 1)
    differences = [] if part == "models" else [difference(name, "accuracy") for name in PROTOCOLS]
    published_column = [theirs] if table in paper(benchmark) else []
    return [SET, *PARTS[part].columns, *published_column, *SCORES, *differences, SEEDS]


def difference(protocol: str, score: str) -> Column:
    """A score minus that of the base, paired over the seeds."""
    heading = f"Δ {PROTOCOLS[protocol]}"
    return Column(heading, f"{protocol}_difference", lambda c: c.difference(lambda _, r: r.score(protocol, score)), 1)


def difference_notes(cells: Sequence[Cell]) -> list[str]:
    """Notes on the differences."""
    bases = sorted({PARTS[cell.variant.part].base_of(cell.variant) for cell in cells})
    means = "Δ: the score minus that of the base with the same seed, mean and 95 % interval by Student's t."
    return [f"{means} Base: {', '.join(bases)}."]


def accuracy_notes(cells: Sequence[Cell]) -> list[str]:
    benchmark, notes = cells[0].benchmark, [OURS]
    for part in dict.fromkeys(cell.variant.part for cell in cells):
        table = "accuracy" if part == "models" else part
        notes += [source(benchmark, table)] if table in paper(benchmark) else []
        notes += ["Without r-scores in the output, r stays in the objective J."] if part == "r-scores" else []
    if any(cell.dataset == "SpokenArabicDigits" for cell in cells):
        notes.append("SpokenArabicDigits: the paper's script may have trained on the test file.")
    return notes if cells[0].variant.part == "models" else notes + difference_notes(cells)


def lra_notes(cells: Sequence[Cell]) -> list[str]:
    """Notes on the size of the test set and the length of the trainings, which limit comparisons."""
    notes, trainings = accuracy_notes(cells), set()
    samples: dict[tuple[str, int], list[float]] = {}
    for cell in cells:
        for run in cell.all_runs:
            accuracy, count = run.score("validation_chosen"), run.data.get("test_samples", run.data.get("test_cases"))
            if accuracy is not None and count:
                samples.setdefault((cell.dataset, count), []).append(accuracy * (100 - accuracy) / count)
            steps, size = steps_of(run), run.settings["trainer"]["batch_size"]
            trainings.add((cell.dataset, steps, size, run.settings["optim"]["lr"]))
    if any(cell.dataset == "pathfinder" for cell in cells):
        notes.append("pathfinder: generated by this library, not the images behind the paper's numbers.")
    if samples:
        each = ", ".join(f"{t} {n:,} (± {math.sqrt(fmean(v)):.1f})" for (t, n), v in sorted(samples.items()))
        notes.append(f"Samples in the test set, and the standard error that they leave in one accuracy: {each}.")
    for task, steps, size, lr in sorted(trainings):
        their_steps, their_size = paper("lra")["training"].get(task, (steps, size))
        theirs = f"paper {their_steps:,} × {their_size} at {paper('lra')['learning_rate']:g}"
        is_same = (steps, size) == (their_steps, their_size)
        share = "" if is_same else f" ({theirs}: {100 * steps * size / their_steps / their_size:.2g} % of its samples)"
        notes.append(f"{task}: {steps:,} steps × {size} samples at learning rate {lr:g}{share}.")
    return notes


def steps_of(run: Run) -> int:
    return int(run.settings["trainer"]["epochs"]) * int(run.settings["trainer"]["steps_per_epoch"])


def efficiency_columns(cells: Sequence[Cell]) -> list[Column]:
    """UEA: seconds per epoch. D4RL: seconds per 1000 steps, published by level."""
    benchmark = cells[0].benchmark
    is_uea = benchmark == "uea"
    digits, unit = (2, "s/epoch") if is_uea else (3, "s/1K steps")

    def seconds(cell: Cell) -> Stat | None:
        steps = cell.first(lambda run: run.settings["trainer"]["steps_per_epoch"])
        return cell.stat(lambda run: run.seconds_per_epoch * (1000 / steps if steps else 1))

    def their_seconds(cell: Cell) -> float | None:
        level = cell.dataset.partition("-")[2]
        return cell.paper("seconds") if is_uea else published("d4rl", "seconds", level, cell.variant.name)

    def their_memory(cell: Cell) -> float | None:  # one number for all sets
        is_shown = cell.is_average or not is_uea
        return paper(benchmark)["seconds"]["memory"].get(cell.variant.name) if is_shown else None

    return [
        SET,
        LENGTH,
        MODEL,
        Column(f"Paper {unit}", "paper_seconds", their_seconds, 1),
        Column(unit, "seconds", seconds, digits),
        Column("× softmax", "times_faster", lambda cell: cell.ratio(seconds), 2, form="{}×"),
        Column("Paper GB", "paper_gb", their_memory, 1),
        replace(PEAK, digits=digits),
        LESS_MEMORY,
        SEEDS,
    ]


def efficiency_notes(cells: Sequence[Cell]) -> list[str]:
    return [
        source(cells[0].benchmark, "seconds"),
        "Ours: training only, median epoch, mean ± standard deviation over the seeds; one run at a time on a device. "
        "Softmax attention uses torch's scaled_dot_product_attention without gradient checkpointing.",
        f"{PEAK_NOTE} It includes the data that is kept on the device. An average row has the largest of the sets.",
    ]


def lra_efficiency_columns(cells: Sequence[Cell]) -> list[Column]:
    authors = {cell.dataset: cell for cell in cells if cell.variant.name == AUTHORS_CODE}

    def seconds(key: str) -> Callable[[Cell], float | None]:
        return lambda cell: cell.first(lambda run: run.score("step", key))

    def over_authors(cell: Cell) -> str | None:
        pair = replace(cell, base=authors.get(cell.dataset))
        times = [pair.ratio(seconds(key)) for key in ("graph", "eager")]
        shown = [MISSING if value is None else f"{value:.1f}×" for value in times]
        return f"{shown[0]} ({shown[1]})" if cell.variant.name in ("primal", "primal+") else ""

    return [
        SET,
        LENGTH,
        MODEL,
        Column("Paper s/1K", "paper_seconds", lambda cell: cell.paper("seconds"), 1),
        Column("s/1K graph", "graph", seconds("graph"), 2),
        Column("s/1K eager", "eager", seconds("eager"), 2),
        Column("× softmax", "times_faster", lambda cell: cell.ratio(seconds("graph")), 1, form="{}×"),
        Column("× authors", "times_faster_than_authors", over_authors),
        Column("Paper GB", "paper_gb", lambda cell: cell.paper("memory"), 2),
        PEAK,
        replace(LESS_MEMORY, digits=1),
    ]


def lra_efficiency_notes(cells: Sequence[Cell]) -> list[str]:
    return [
        f"{source('lra', 'seconds')} Its softmax attention uses gradient checkpointing, ours does not.",
        "A step: forward, losses, backward, optimiser, at the paper's batch size in bfloat16 autocast, on random "
        "tokens. graph: compiled and replayed as one CUDA graph, as in a training (the authors' implementation: not "
        "compiled). eager: kernel by kernel. Median of CUDA events, times 1000.",
        "× authors: how many times faster than the authors' implementation, by graph (in brackets: eager).",
        "Peak GB: allocated by torch in a step without recording, above the start, in 10⁹ bytes.",
        "Versions: torch " + ", ".join(sorted({run.torch for cell in cells for run in cell.all_runs})) + ".",
    ]


def d4rl_columns(cells: Sequence[Cell]) -> list[Column]:
    part = cells[0].variant.part

    def theirs(cell: Cell) -> Stat | None:
        mean = cell.paper("score" if part == "models" else part)
        std = paper("d4rl")["score"]["deviations"].get(cell.dataset, {}).get(cell.variant.name)
        return None if mean is None else Stat(mean, std, 3)

    return [
        SET,
        *PARTS[part].columns,
        Column("Paper (on D4RL)", "paper", theirs, 1),
        Column("BEST-ON-TEST", "best_on_test", lambda c: c.score("best_on_test", "score"), 1, is_optional=True),
        Column("LAST", "last", lambda cell: cell.score("last", "score"), 1),
        difference("last", "score"),
        Column("Return", "return", lambda c: None if c.is_average else c.score("last", "return_mean"), 0),
        SEEDS,
    ]


def d4rl_notes(cells: Sequence[Cell]) -> list[str]:
    """Notes on the scores, the data and the number of steps."""
    runs = [run for cell in cells for run in cell.all_runs]

    def listed(values: Iterable[Any]) -> str:
        numbers = sorted({value for value in values if value is not None})
        return " or ".join(value if isinstance(value, str) else f"{value:,.0f}" for value in numbers)

    sources = sorted({str(run.data.get("source", "unknown")) for run in runs})
    notes = [
        "Ours: D4RL's normalised score (0 random, 100 expert) of the mean return of "
        f"{listed(run.score('last', 'episodes') for run in runs)} episodes at the last step, mean ± standard deviation "
        "over the seeds. Return: the mean before normalisation. BEST-ON-TEST, where shown: the best checkpoint by the "
        "episodes that measure it, so too high.",
        f"Trained on {listed(run.data.get('transitions') for run in runs)} transitions for "
        f"{listed(map(steps_of, runs))} steps. Data: {'; '.join(sources)}.",
        source("d4rl", "score" if cells[0].variant.part == "models" else cells[0].variant.part),
        *difference_notes(cells),
    ]
    if any("collected anew" in name for name in sources):
        notes.insert(1, "The trajectories come from other policies than D4RL's: compare our rows with each other only.")
    return notes


def language_columns(cells: Sequence[Cell]) -> list[Column]:
    def seen(cell: Cell) -> int | None:
        return cell.first(lambda run: run.data.get("bytes_seen"))

    def over_softmax(cell: Cell) -> float | None:
        if cell.base is None or seen(cell) != seen(cell.base):  # models that saw different amounts of text
            return None
        for name in ("bits_per_byte", "validation_bits_per_byte"):
            mine, theirs = (c.score("last", name) for c in (cell, cell.base))
            if mine and theirs:
                return 100 * (mine.mean / theirs.mean - 1)
        return None

    def score(heading: str, name: str, digits: int) -> Column:
        return Column(heading, name, lambda cell: cell.score("last", name), digits)

    return [
        replace(SET, heading="Text"),
        Column("MB seen", "bytes_seen", seen, 0, 1e-6),
        replace(MODEL, value=lambda cell: cell.variant.name),
        Column("Parameters M", "parameters", lambda cell: cell.first(lambda run: run.parameters), 2, 1e-6),
        Column("Paper ppl", "paper", lambda cell: cell.paper("perplexity"), 1, is_optional=True),
        score("Valid ppl", "validation_perplexity", 2),
        score("Test ppl", "perplexity", 2),
        score("Valid bits/byte", "validation_bits_per_byte", 4),
        score("Test bits/byte", "bits_per_byte", 4),
        Column("than softmax %", "bits_per_byte_over_softmax", over_softmax, 2),
        Column("Tokens/s", "tokens_per_second", rate("tokens_per_epoch"), 0),
        PEAK,
        SEEDS,
    ]


def language_notes(cells: Sequence[Cell]) -> list[str]:
    return [
        "Bits per byte: the loss of all tokens of the split, each predicted once in windows of one length, over the "
        "bytes of its text, at the last step. Than softmax: bits per byte relative to softmax attention after the same "
        "amount of text, on test, or on validation in runs without test scores; negative is better.",
        f"Tokens/s: of training, median epoch. {PEAK_NOTE}",
        *([source("lm", "perplexity")] if any(cell.paper("perplexity") for cell in cells) else []),
    ]


def image_columns(cells: Sequence[Cell]) -> list[Column]:
    return [SET, MODEL, *SCORES, Column("Images/s", "images_per_second", rate("images_per_epoch"), 0), PEAK, SEEDS]


def image_notes(cells: Sequence[Cell]) -> list[str]:
    theirs = paper("image")["imagenet"]
    rows = [f"{name}: " + ", ".join(f"{k} {v}" for k, v in row.items()) for name, row in theirs["rows"].items()]
    return [
        OURS,
        "Images/s: training images per second of the median epoch, reading and augmentation included, one run at a "
        f"time. {PEAK_NOTE} It includes the pixels of a set that is kept on the device.",
        f"{source('image', 'imagenet')} {'; '.join(rows)}.",
    ]


def is_holdout(cells: Sequence[Cell]) -> bool:
    return any(run.config["holdout"] for cell in cells for run in cell.all_runs)


def is_timed(run: Run) -> bool:
    """Whether a fit had two threads, and other processes used few cores during fit and predict."""
    costs = [run.scores[step] for step in ("fit", "predict") if step in run.scores]
    if not run.device.endswith(TIMED_FITS) or not costs or any(cost["other_cores"] is None for cost in costs):
        return False
    seconds = sum(cost["other_cores"] * cost["seconds"] for cost in costs)
    return bool(seconds < MAX_OTHER_CORES * sum(cost["seconds"] for cost in costs))


def classifier_columns(cells: Sequence[Cell]) -> list[Column]:
    prefix = "validation_" if is_holdout(cells) else ""

    def score(cell: Cell, run: Run, name: str = "accuracy") -> float | None:
        return run.score(cell.variant.options["part"], f"{prefix}{name}")

    def accuracy(cell: Cell) -> Stat | str | None:
        is_refused = cell.all_runs and not cell.has_scores
        return "refused" if is_refused else cell.stat(lambda run: score(cell, run))

    def cost(step: str, name: str) -> Callable[[Cell], Stat | None]:
        def value(cell: Cell, run: Run) -> float | None:
            part = cell.variant.options["part"]
            if cell.is_average or not is_timed(run):
                return None
            return run.score(step, name) if part == "last" else run.score(part, f"{step}_{name}")

        return lambda cell: cell.stat(lambda run: value(cell, run))

    return [
        SET,
        *PARTS["classifiers"].columns,
        Column("Accuracy", "accuracy", accuracy, 1),
        Column("− MultiRocketHydra", "difference", lambda cell: cell.difference(score), 1),
        Column("ECE", "calibration_error", lambda c: c.stat(lambda run: score(c, run, "calibration_error")), 1, 100.0),
        Column("Fit s", "fit_seconds", cost("fit", "seconds"), 1),
        Column("Predict s", "predict_seconds", cost("predict", "seconds"), 1),
        Column("Fit CPU s", "fit_cpu_seconds", cost("fit", "cpu_seconds"), 1),
        Column("Seeds", "seeds", lambda cell: str(len(cell.by_seed(lambda run: score(cell, run)))), 0),
    ]


def classifier_notes(cells: Sequence[Cell]) -> list[str]:
    scored = "holdout samples of the training set, no test score was computed" if is_holdout(cells) else "test"
    refusals: dict[str, list[str]] = {}
    for cell in cells:
        for reason in {run.data["refused"] for run in cell.all_runs if "refused" in run.data}:
            refusals.setdefault(f"{CLASSIFIERS[cell.variant.name]}: {reason}", []).append(cell.dataset)
    return [
        f"Accuracy on {scored}, in per cent, mean ± standard deviation over the seeds. − MultiRocketHydra: the "
        "difference with the same seed, mean and 95 % interval by Student's t.",
        "ECE: expected calibration error in points, 15 bins. MultiRocketHydra predicts probabilities 0 and 1 only.",
        f"Seconds: of fits with {TIMED_FITS} during which other processes used less than {MAX_OTHER_CORES} cores. Each "
        "fit has its own process.",
        *(f"Refused on {', '.join(sets)}. {reason}" for reason, sets in refusals.items()),
    ]


# The grids behind the tables


def classifier_variants() -> tuple[Variant, ...]:
    """PrimalClassifier, each of its parts alone from the same fits, controls, and aeon's classifiers."""
    parts = {f"primal-{part}": ("primal", part) for part in ("networks", "features")}
    rows = [(name, *parts.get(name, (name, "last"))) for name in CLASSIFIERS]
    return tuple(Variant("classifiers", name, model, {"part": part}) for name, model, part in rows)


def model_variants(models: Iterable[str]) -> tuple[Variant, ...]:
    return tuple(Variant("models", model, model) for model in models)


def extra_variants() -> tuple[Variant, ...]:
    """Rows that a table of models accepts beside its own: every attention, none of them, and η = 0."""
    names = [name + plus for name in attention_names() for plus in ("", "+")]
    without_loss = [Variant("models", f"{name}-eta0", name, {"eta": 0.0}) for name in ("primal", "primal+")]
    return (*model_variants([*names, "none"]), *without_loss)


def ablation_variants(*parts: str) -> tuple[Variant, ...]:
    """The paper's grids over η and s, data-independent weights (Primal.+), outputs without r, and η = 0."""
    models, words = ("primal", "primal+"), ("without", "with")
    grid = [(s, eta) for s in (20, 30, 40) for eta in (0.0, 0.1, 0.2, 0.5)]
    rows: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
        "eta-s": [(f"primal-s{s}-eta{eta:g}", "primal", {"rank": s, "eta": eta}) for s, eta in grid],
        "data-dependence": [(f"primal+-{w}dependent", "primal+", {"data_dependent": not w}) for w in ("in", "")],
        "r-scores": [(f"{m}-{word}-r", m, {"r_scores": word == "with"}) for m in models for word in words],
        "eta": [row for m in models for row in ((f"{m}-eta0", m, {"eta": 0.0}), (m, m, {}))],
        "rank": [(f"primal+-s{s}", "primal+", {"rank": s}) for s in (32, 64, 96)],
    }
    return tuple(Variant(part, *row) for part in parts for row in rows[part])


def language_variants() -> tuple[Variant, ...]:
    """Softmax, every causal mode of Primal-Attention, the delta rule, a hybrid and baselines.

    The controls of the delta rule's convolution and gate are softmax with both ("softmax-local"), and both without
    attention ("local"). "-sigmoid" is the activation of the gate. All have the parameters of softmax attention's model:
    what an attention saves goes to the feed-forward width. The most informative ones come first, for grids that are
    cut off.
    """
    delta = {"primal_mode": None}  # heads and rank in proportion to the model, conv 4 and gate
    hybrid = {"attention": ("primal", "primal", "softmax") * 2, **delta}
    local = {"conv": 4, "gate": True}
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("delta", "primal", delta),
        ("hybrid", "primal", hybrid),
        ("softmax-local", "softmax", {**local, "conv_layers": "all"}),
        ("local", "none", local),
    ]
    sigmoid = {"gate_activation": "sigmoid"}
    rows += [(f"{name}-sigmoid", model, {**options, **sigmoid}) for name, model, options in rows]
    rows.insert(0, ("softmax", "softmax", {}))
    for model, conv in (("primal+", {}), ("primal", {}), ("primal", {"conv": 4}), ("primal+", {"conv": 4})):
        suffix, modes = "-conv" if conv else "", ("mean", "landmarks", "decay")
        rows += [(f"{model}-{mode}{suffix}", model, {"primal_mode": mode, **conv}) for mode in modes]
    rows += [("linear", "linear", {}), ("flow", "flow", {})]
    return tuple(Variant("models", *row) for row in rows)


@dataclass(frozen=True)
class TableKind:
    """A table by name: its title, its default grid, what its runs change in the recipe, its columns and notes."""

    title: str
    benchmark: str
    columns: Callable[[Sequence[Cell]], Sequence[Column]]
    notes: Callable[[Sequence[Cell]], Sequence[str]]
    sets: tuple[str, ...]
    variants: tuple[Variant, ...]
    takes_any_model: bool = False
    """Whether other attentions than those of `variants` can be rows."""
    seeds: int = 3
    changes: Mapping[str, Any] = field(default_factory=dict)
    needed_scores: frozenset[str] | None = None
    has_average: bool = True
    is_timed: bool = False
    source: Literal["runs", "steps", "fits"] = "runs"
    """Source of the cells: trainings, the step costs of `primal bench lra`, or fits of classifiers."""
    family: str = ""
    """Family of recipes; by default the one named like the benchmark."""
    suffix: str = ""
    """Suffix of the folder of its runs and results, after the name of the recipe family."""


@cache
def table_kinds() -> dict[str, TableKind]:
    uea, lra, d4rl = (paper(name) for name in ("uea", "lra", "d4rl"))
    uea_sets, lra_sets = tuple(uea["accuracy"]["rows"]), tuple(lra["accuracy"]["rows"])
    chosen = frozenset({"validation_chosen"})
    return {
        "uea": TableKind(
            "UEA test accuracy (%)", "uea", accuracy_columns, accuracy_notes, uea_sets,
            model_variants(uea["accuracy"]["columns"]), True, seeds=5, changes={"protocol": "both"},
        ),
        "uea-ablation": TableKind(
            "UEA ablations, test accuracy (%)", "uea", accuracy_columns, accuracy_notes, uea_sets,
            ablation_variants("eta-s", "data-dependence", "r-scores", "eta"), changes={"protocol": "both"},
        ),
        "uea-efficiency": TableKind(
            "UEA training time and memory", "uea", efficiency_columns, efficiency_notes, uea_sets,
            model_variants(uea["seconds"]["columns"]), True, is_timed=True, suffix="-efficiency",
            changes={"protocol": "last", "trainer.epochs": 10, "trainer.evaluate_every": 10},
        ),
        "lra": TableKind(
            "Long-Range Arena test accuracy (%)", "lra", accuracy_columns, lra_notes, lra_sets,
            model_variants(lra["accuracy"]["columns"]), True, needed_scores=chosen,
        ),
        "lra-ablation": TableKind(
            "Long-Range Arena ablations, test accuracy (%)", "lra", accuracy_columns, lra_notes, lra_sets,
            ablation_variants("data-dependence", "r-scores", "eta"), needed_scores=chosen,
        ),
        "lra-efficiency": TableKind(
            "Long-Range Arena: time and memory of a training step", "lra", lra_efficiency_columns, lra_efficiency_notes,
            lra_sets, model_variants((*lra["seconds"]["columns"], AUTHORS_CODE)), has_average=False, seeds=1,
            source="steps", suffix="-efficiency",
        ),
        "d4rl": TableKind(
            "D4RL normalised score", "d4rl", d4rl_columns, d4rl_notes, tuple(d4rl["score"]["rows"]),
            model_variants(d4rl["score"]["columns"]), True,
        ),
        "d4rl-ablation": TableKind(
            "D4RL ablation, normalised score", "d4rl", d4rl_columns, d4rl_notes, tuple(d4rl["rank"]["rows"]),
            ablation_variants("rank"),
        ),
        "d4rl-efficiency": TableKind(
            "D4RL training time and memory", "d4rl", efficiency_columns, efficiency_notes, ("hopper-medium",),
            model_variants(d4rl["score"]["columns"]), True, has_average=False, is_timed=True, suffix="-efficiency",
            changes={"trainer.epochs": 3, "trainer.steps_per_epoch": 500, "evaluation.episodes": 0},
        ),
        "lm": TableKind(
            "Language models", "lm", language_columns, language_notes, ("wikipedia",), language_variants(),
            seeds=1, needed_scores=frozenset({"last"}), has_average=False, is_timed=True,
        ),
        "image": TableKind(
            "Images: test accuracy (%), speed and memory of training", "image", image_columns, image_notes,
            ("imagenette",), model_variants(paper("image")["models"]), True, needed_scores=frozenset(PROTOCOLS),
            has_average=False, is_timed=True,
        ),
        "uea-modern": TableKind(
            "UEA classifiers, accuracy (%)", "uea", classifier_columns, classifier_notes, CLASSIFIER_SETS,
            classifier_variants(), seeds=5, changes={"holdout": 0.0}, is_timed=True, source="fits",
            family="uea-modern", suffix="-classifiers",
        ),
    }  # fmt: skip
