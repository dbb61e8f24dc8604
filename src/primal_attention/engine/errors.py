"""Errors that the user can correct; each message is one line that names the cause and what would work."""

from __future__ import annotations


class RunError(Exception):
    """A recipe, a flag or a run folder is not valid."""


class WriteError(RunError):
    """A file cannot be written, for example because the disk is full."""


class DivergedError(RunError):
    """The loss is no longer a finite number."""


class Preempted(Exception):  # noqa: N818 - not an error
    """The process received SIGTERM and has saved a checkpoint."""
