"""The error of this room: a run cannot start or go on, and the message says in one line why and what would work."""

from __future__ import annotations


class RunError(Exception):
    """Something about a recipe, a flag or a run folder that its owner can mend."""


class DivergedError(RunError):
    """The loss is no longer a finite number."""


class Preempted(Exception):  # noqa: N818 - nothing has gone wrong
    """The process was asked to stop, has saved where it stands, and can go on with --resume."""
