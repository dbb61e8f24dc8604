"""Write the notebooks of three examples, with their outputs.

    make notebooks                                        # all
    .venv/bin/python docs/notebooks.py directed_graph     # one

A line `# %%` in a script begins a code cell and `# %% [markdown]` a text cell. The docstring is the first text cell.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("classify_time_series", "stream_language_model", "directed_graph")
MARKER = re.compile(r"^# %%(?P<markdown> \[markdown\])?$\n?", re.MULTILINE)


def notebook_path(name: str) -> Path:
    return ROOT / "docs" / "notebooks" / f"{name}.ipynb"


def read_cells(name: str) -> list[tuple[str, str]]:
    """The cells of a script, as (kind, source)."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    introduction = ast.get_docstring(ast.parse(text)) or ""
    cells = [("markdown", f"# {introduction}\n\nGenerated from `examples/{name}.py` by `make notebooks`.")]
    markers = list(MARKER.finditer(text))
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    for marker, end in zip(markers, ends, strict=True):
        source = text[marker.end() : end].strip()
        if marker["markdown"]:
            cells.append(("markdown", re.sub(r"^# ?", "", source, flags=re.MULTILINE)))
        else:
            cells.append(("code", source))
    return cells


def make_notebook(name: str) -> dict[str, Any]:
    """The notebook of a script, without outputs."""
    cells: list[dict[str, Any]] = []
    for i, (kind, source) in enumerate(read_cells(name)):
        cell = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": source}
        cells.append(cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def clean_outputs(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop warnings on stderr, which name paths of the machine, and join the printed lines of a cell."""
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    others = [output for output in outputs if output["output_type"] != "stream"]
    stream = [{"name": "stdout", "output_type": "stream", "text": printed}] if printed else []
    return [*stream, *others]


def execute(name: str) -> None:
    """Run a notebook and write it with its outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.from_dict(make_notebook(name))
    with tempfile.TemporaryDirectory() as folder:  # scripts write into the working directory
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, timeout=1200, record_timing=False, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = clean_outputs(cell.outputs)
    notebook.metadata.pop("language_info", None)  # names the Python version of the machine
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    notebook_path(name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:] or NAMES:
        execute(each)
        print(notebook_path(each).relative_to(ROOT))
