"""Run the command in this process, in a folder with a small data set."""

from collections.abc import Callable
from pathlib import Path

import pytest
import toy

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


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small data set under data/uea."""
    toy.folder(tmp_path / "data" / "uea")
    monkeypatch.chdir(tmp_path)
    return tmp_path
