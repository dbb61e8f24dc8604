"""Run the command in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from primal_attention.cli import main as cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def primal(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call `primal WORDS…`; returns exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = cli.main(words)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
