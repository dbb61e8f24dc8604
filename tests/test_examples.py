"""The examples run, are short, and their notebooks are current."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
# What an example prints at its end, and the packages that it needs.
EXAMPLES = {
    "swap_attention": ("replaced: encoder.layers.1.self_attn", ()),
    "classify_time_series": ("primal train uea-modern --data.file mine.npz", ("aeon", "lightning")),
    "stream_language_model": ("The statement ", ()),
    "finetune_lora": ("merged model: largest difference", ("transformers", "peft")),
    "directed_graph": ("nearest sending group of the new node: 0", ("sklearn", "matplotlib")),
    "context_parallel": ("largest difference to one process: outputs", ()),
}


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_in_its_small_setting(name: str, tmp_path: Path) -> None:
    expected, packages = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    small = {"PRIMAL_SMALL": "1", "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **small}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert expected in done.stdout


def test_every_script_is_tested_short_and_names_its_command() -> None:
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert {script.stem for script in scripts} == set(EXAMPLES)
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 120, script
        assert f"    python examples/{script.name}\n" in text


def test_notebooks_are_those_of_the_scripts_with_outputs(notebooks: ModuleType) -> None:
    assert len(notebooks.NAMES) == 3
    for name in notebooks.NAMES:
        stored = json.loads(notebooks.notebook_path(name).read_text(encoding="utf-8"))
        cells = [(cell["cell_type"], cell["source"]) for cell in stored["cells"]]
        assert cells == notebooks.read_cells(name), f"examples/{name}.py changed: run make notebooks"
        outputs = [output for cell in stored["cells"] for output in cell.get("outputs", ())]
        assert len(outputs) >= 3
        assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
