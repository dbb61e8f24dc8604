"""The tables that `primal table` can make from runs: their titles, grids and settings, and what draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from primal_attention.engine.tables.plan import ABLATIONS, Variant
from primal_attention.engine.text.lineup import LINEUP
from primal_attention.report import accuracy, efficiency, paper_d4rl, paper_images, paper_lra
from primal_attention.report import d4rl as d4rl_tables
from primal_attention.report import images as image_tables
from primal_attention.report import language as language_tables
from primal_attention.report import lra as lra_tables
from primal_attention.report import paper_tables as paper
from primal_attention.report.cells import Cell
from primal_attention.report.table import Table


@dataclass(frozen=True)
class Kind:
    """A table by name: its title, what its runs change in the recipe, its default grid, and what draws it."""

    title: str
    changes: dict[str, Any]
    models: tuple[str, ...]
    seeds: int
    draw: Callable[[str, Sequence[Cell], str], Table]
    timed: bool = False
    suffix: str = ""
    """Of the folder that its runs and results go to, behind the recipe family's name."""
    family: str = "uea"
    sets: tuple[str, ...] = paper.SETS
    parts: tuple[str, ...] = ()
    """Of an ablation."""
    needs: frozenset[str] | None = None
    lineup: Mapping[str, Variant] = field(default_factory=dict)
    """Rows that are more than an attention's name; --models chooses among them."""


TABLES = {
    "uea": Kind("UEA test accuracy (%)", {"protocol": "both"}, tuple(paper.MODELS), 5, accuracy.accuracy),
    "uea-efficiency": Kind(
        "UEA training time and memory",
        # Times and memory are those of every epoch alike, so a few epochs tell them.
        {"protocol": "last", "trainer.epochs": 10, "trainer.evaluate_every": 10},
        tuple(paper.SECONDS),
        3,
        efficiency.efficiency,
        timed=True,
        suffix="-efficiency",
    ),
    "uea-ablation": Kind(
        "UEA ablations, test accuracy (%)", {"protocol": "both"}, (), 3, accuracy.accuracy, parts=ABLATIONS
    ),
    "lra": Kind(
        "Long-Range Arena test accuracy (%)",
        {},
        tuple(paper_lra.MODELS),
        3,
        lra_tables.accuracy,
        family="lra",
        sets=paper_lra.TASKS,
        needs=frozenset({"validation_chosen"}),
    ),
    "lra-ablation": Kind(
        "Long-Range Arena ablations, test accuracy (%)",
        {},
        (),
        3,
        lra_tables.accuracy,
        family="lra",
        sets=paper_lra.TASKS,
        parts=("data-dependence", "r-scores"),
        needs=frozenset({"validation_chosen"}),
    ),
    "image": Kind(
        "Images: test accuracy (%), speed and memory of training",
        {},
        tuple(paper_images.TITLES),
        3,
        image_tables.images,
        family="image",
        sets=("imagenette",),
        needs=frozenset({"last", "best_on_test", "validation_chosen"}),
        timed=True,
    ),
    "d4rl": Kind(
        "D4RL normalised score",
        {},
        tuple(paper_d4rl.MODELS),
        3,
        d4rl_tables.scores,
        family="d4rl",
        sets=paper_d4rl.SETS,
    ),
    "d4rl-efficiency": Kind(
        "D4RL training time and memory",
        {"trainer.epochs": 3, "trainer.steps_per_epoch": 500, "evaluation.episodes": 0},
        tuple(paper_d4rl.MODELS),
        3,
        d4rl_tables.cost,
        timed=True,
        suffix="-efficiency",
        family="d4rl",
        sets=("hopper-medium",),
    ),
    "lm": Kind(
        "Language models",
        {},
        (),
        1,
        language_tables.language,
        family="lm",
        sets=("wikipedia",),
        needs=frozenset({"last"}),
        timed=True,
        lineup=LINEUP,
    ),
}
