"""Runs that differ in their seed alone, counted together: means, spreads, names, colours and the paper's marks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primal_attention.report.charts import SLOTS
from primal_attention.report.page_numbers import number_at
from primal_attention.report.page_runs import Run
from primal_attention.report.paper_tables import ACCURACY

# Key in a summary's scores, heading, how its bar is filled (a class of the style sheet).
PROTOCOLS = (
    ("last", "LAST", "full"),
    ("validation_chosen", "VALIDATION-CHOSEN", "half"),
    ("best_on_test", "BEST ON TEST", "open"),
)
# Changes no number of a run, or says only where it ran.
ASIDE = ("seed", "trainer.progress", "trainer.logger", "trainer.checkpoint_every", "data.folder")
FIXED_SLOTS = {"primal": 0, "primal-fused": 0, "softmax": 1, "sdpa": 1, "primal+": 2, "primal-cpu": 2, "primal-lean": 2}


@dataclass(frozen=True)
class Spread:
    """Mean and, for more than one value, standard deviation (n − 1) over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.deviation is None else f"{self.mean:.1f} ± {self.deviation:.1f}"


@dataclass(frozen=True)
class Group:
    """The seeds of one variant of one recipe."""

    task: str
    recipe: str
    label: str
    name: str
    """The label, and what sets the variant apart from others with the same label."""
    runs: tuple[Run, ...]

    def once(self) -> list[Run]:
        """One run per seed: a run repeated with the same seed is no further evidence."""
        return list({run.seed: run for run in reversed(self.runs) if run.finished}.values())[::-1]

    def spread(self, values: Iterable[float | None]) -> Spread | None:
        known = tuple(v for v in values if v is not None)
        return Spread(known) if known else None

    def accuracy(self, protocol: str, key: str = "accuracy") -> Spread | None:
        return self.spread(run.accuracy(protocol, key) for run in self.once())

    def fact(self, *keys: str) -> Spread | None:
        """A number of the summaries, by its path in them."""
        return self.spread(number_at(run.summary, keys) for run in self.once())

    @property
    def family(self) -> str:
        return self.recipe.partition("/")[0]

    @property
    def paper(self) -> float | None:
        return mark(self.task, self.label)


def mark(task: str, label: str) -> float | None:
    """The paper's test accuracy of a model on a set; one softmax layer before one Primal layer is its Primal.+."""
    return ACCURACY.get(task, {}).get("primal+" if label == "softmax-primal" else label)


def group(runs: Sequence[Run]) -> list[Group]:
    """Groups in order of task and family, what the page is about first."""
    variants: dict[tuple[str, str, str], dict[tuple[Any, ...], list[Run]]] = {}
    for run in runs:
        by_settings = variants.setdefault((run.task, run.recipe, run.label), {})
        by_settings.setdefault(settings(run), []).append(run)
    found = []
    for (task, recipe, label), by_settings in variants.items():
        unknown = by_settings.pop((), [])  # result files do not tell their settings
        if len(by_settings) == 1:
            next(iter(by_settings.values())).extend(unknown)
        elif unknown:
            by_settings[()] = unknown
        names = variant_names(label, list(by_settings))
        for name, members in zip(names, by_settings.values(), strict=True):
            found.append(Group(task, recipe, label, name, tuple(sorted(members, key=lambda run: run.seed))))
    first = ("primal", "primal+", "softmax")
    order = {label: i for i, label in enumerate(first)}
    return sorted(found, key=lambda g: (g.task.lower(), g.family, order.get(g.label, len(first))))


def settings(run: Run) -> tuple[tuple[str, str], ...]:
    """What a run was told, as dotted names and values that can be compared."""
    return tuple(pair for pair in flat(run.settings) if pair[0] not in ASIDE)


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, " ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return found


def variant_names(label: str, variants: Sequence[tuple[tuple[str, str], ...]]) -> list[str]:
    """The label alone where there is one variant, else with the fields that differ."""
    if len(variants) < 2:
        return [label] * len(variants)
    tables = [dict(variant) for variant in variants]
    fields = dict.fromkeys(key for table in tables for key in table)
    differing = [key for key in fields if len({table.get(key) for table in tables if table}) > 1]
    names = []
    for table in tables:
        told = ", ".join(f"{key.rpartition('.')[2]} {table[key]}" for key in differing if key in table)
        names.append(f"{label} ({told or 'settings not told'})")
    return names


def by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups under the heading of their panels: the set, with the family of recipes where a set has several."""
    families: dict[str, set[str]] = {}
    for one in groups:
        families.setdefault(one.task, set()).add(one.family)
    found: dict[str, list[Group]] = {}
    for one in groups:
        title = one.task if len(families[one.task]) == 1 else f"{one.task} · {one.family}"
        found.setdefault(title, []).append(one)
    return found


class Palette:
    """One colour per name on the whole page; Primal is warm and softmax attention blue."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._next = 3

    def __getitem__(self, name: str) -> int:
        if name not in self._slots:
            if name in FIXED_SLOTS:
                self._slots[name] = FIXED_SLOTS[name]
            else:
                self._slots[name] = 3 + (self._next - 3) % (SLOTS - 3)
                self._next += 1
        return self._slots[name]
