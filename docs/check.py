"""Check the documents: run their Python blocks, look up every relative link, and compare tables with stored results.

.venv/bin/python docs/check.py            # check
.venv/bin/python docs/check.py --write    # also write the tables of the stored results into the documents
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANY_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
TABLE = re.compile(r"^<!-- table: (.+?) -->\n(.*?)^<!-- end -->", re.DOTALL | re.MULTILINE)
# Documents whose blocks need nothing but each other.
COMPLETE = (
    "README.md",
    "docs/guide/quickstart.md",
    "docs/guide/masks-and-packing.md",
    "docs/guide/streaming.md",
    "docs/guide/objective.md",
    "docs/guide/benchmarks/lm.md",
)


def documents() -> list[Path]:
    pages = [page for page in ROOT.glob("docs/**/*.md") if "_build" not in page.parts]
    return sorted([*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *pages])


def broken_links(document: Path) -> list[str]:
    """Relative links of a document that lead to no file, or to no heading of it."""
    text = ANY_BLOCK.sub("", document.read_text(encoding="utf-8"))
    return sorted({link for link in LINK.findall(text) if "://" not in link and not _exists(document, link)})


def _exists(document: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    file = document.parent / path if path else document
    return file.exists() and (not heading or file.suffix != ".md" or heading in anchors(file))


def anchors(document: Path) -> set[str]:
    """Names by which a document's headings are linked: lower case, words joined by hyphens."""
    text = ANY_BLOCK.sub("", document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


def run_examples(document: Path, given: Mapping[str, object] | None = None, first: int | None = None) -> int:
    """Run a document's Python blocks in one namespace and return their number.

    Args:
        document: The document.
        given: Names that the blocks use without defining them.
        first: The number of blocks to run; None runs all.
    """
    text = document.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__", **(given or {})}
    blocks = list(PYTHON_BLOCK.finditer(text))[:first]
    for block in blocks:
        line = text.count("\n", 0, block.start(1))  # so that an error shows the document's own line
        exec(compile("\n" * line + block.group(1), str(document), "exec"), namespace)
    return len(blocks)


def make_table(command: str) -> str:
    """The Markdown of a table: of `primal table …`, of `bench model` or of `bench generate`."""
    if command == "bench model":
        return _model_table()
    if command == "bench generate":
        return _generate_table()
    from primal_attention.cli import table

    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            arguments = shlex.split(command.removeprefix("primal table "))
            table.main([*arguments, "--no-run", "--markdown", f"{folder}/table.md"])
            return Path(folder, "table.md").read_text(encoding="utf-8")
    finally:
        os.chdir(before)


def _model_table() -> str:
    """Pairs of SDPA and Primal rows of the stored training steps of whole models."""
    stored = _read_bench("model")
    by_kind: dict[str, dict[str, Any]] = {"sdpa": {}, "primal": {}}
    for row in stored["rows"]:
        by_kind[row["kind"]][row["name"]] = row
    lines = [
        "| model | mode | precision | SDPA ms | Primal ms | time ratio | peak memory ratio |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for name, primal in by_kind["primal"].items():
        sdpa = by_kind["sdpa"][name]
        model = name.removesuffix(f"-{primal['mode']}-{primal['dtype']}")
        lines.append(
            f"| {model} | {primal['mode']} | {primal['dtype']} | {sdpa['wall_ms']:.1f} | {primal['wall_ms']:.1f} "
            f"| {primal['ratio']:.2f} | {primal['peak_ratio']:.2f} |"
        )
    return "\n".join([*lines, "", *_origin(stored, "model")]) + "\n"


def _generate_table() -> str:
    """Time of one more token of whole language models against the tokens read before."""
    stored = _read_bench("generate")
    rows = [row for row in stored["rows"] if "dual" not in row["name"]]  # a mode that was removed
    lengths = sorted({row["length"] for row in rows})
    names = [f"{n // 1024}K" if n < 2**20 else f"{n // 2**20}M" for n in lengths]
    heading = f"| ms per token | {' | '.join(names)} | state, kB: {names[0]} → {names[-1]} |"
    lines = [heading, "|---|" + "--:|" * (len(lengths) + 1)]
    for label in dict.fromkeys(row["label"] for row in rows):
        own = {row["length"]: row for row in rows if row["label"] == label}
        times = " | ".join(f"{own[n]['seconds'] * 1e3:,.1f}" for n in lengths)
        states = " → ".join(f"{own[n]['state_bytes'] / 1e3:,.1f}" for n in (lengths[0], lengths[-1]))
        lines.append(f"| {label} | {times} | {states} |")
    return "\n".join([*lines, "", *_origin(stored, "generate")]) + "\n"


def _read_bench(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _origin(stored: Mapping[str, Any], name: str) -> list[str]:
    device = stored["hardware"].get("gpu") or stored["hardware"]["cpu"]
    command = re.sub(r" --(out|commit) \S+", "", stored["command"])
    return [
        f"- Command: `{command}`",
        f"- `results/bench/{name}.json`; commit {stored['commit'][:7]}; device {device}.",
    ]


def with_tables(document: Path) -> str:
    """The text of a document with every block between `table` and `end` comments generated again."""
    text = document.read_text(encoding="utf-8")
    return TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n{make_table(m[1])}<!-- end -->", text)


def main() -> int:
    failures = [f"{d.relative_to(ROOT)}: nothing at {target}" for d in documents() for target in broken_links(d)]
    for document in documents():
        if (text := with_tables(document)) != document.read_text(encoding="utf-8"):
            if "--write" in sys.argv:
                document.write_text(text, encoding="utf-8")
            else:
                failures.append(f"{document.relative_to(ROOT)}: a table differs from the stored results")
    for failure in failures:
        print(failure, file=sys.stderr)
    with contextlib.redirect_stdout(io.StringIO()):
        blocks = sum(run_examples(ROOT / name) for name in COMPLETE)
    print(f"{len(documents())} documents, {blocks} examples run, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
