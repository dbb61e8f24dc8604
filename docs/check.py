"""Check the documents: run their Python blocks, look up every relative link, and compare tables with stored results.

.venv/bin/python docs/check.py            # check
.venv/bin/python docs/check.py --write    # also write the tables of the stored results into the documents
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANY_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
TABLE = re.compile(r"^<!-- table: primal table (.+?) -->\n(.*?)^<!-- end -->", re.DOTALL | re.MULTILINE)
WHOLE = ("README.md", "docs/language.md")  # documents whose blocks need nothing but each other


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def broken_links(document: Path) -> list[str]:
    """Relative links of a document that lead to no file, or to no heading of it."""
    text = ANY_BLOCK.sub("", document.read_text(encoding="utf-8"))
    return sorted({link for link in LINK.findall(text) if "://" not in link and not _leads(document, link)})


def _leads(document: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    file = document.parent / path if path else document
    return file.exists() and (not heading or file.suffix != ".md" or heading in anchors(file))


def anchors(document: Path) -> set[str]:
    """The names by which a document's headings are linked to: in small letters, words joined by hyphens."""
    text = ANY_BLOCK.sub("", document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


def run_examples(document: Path, given: Mapping[str, object] | None = None, first: int | None = None) -> int:
    """Run a document's Python blocks in one namespace, as a reader would type them; their number.

    given: names that the blocks take for granted; first: how many blocks to run, all of them if it is not said.
    """
    text = document.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__", **(given or {})}
    blocks = list(PYTHON_BLOCK.finditer(text))[:first]
    for block in blocks:
        line = text.count("\n", 0, block.start(1))  # so that an error shows the document's own line
        exec(compile("\n" * line + block.group(1), str(document), "exec"), namespace)
    return len(blocks)


def make_table(command: str) -> str:
    """The Markdown that `primal table` makes from the stored results."""
    from primal_attention.cli import table

    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            table.main([*shlex.split(command), "--no-run", "--markdown", f"{folder}/table.md"])
            return Path(folder, "table.md").read_text(encoding="utf-8")
    finally:
        os.chdir(before)


def with_tables(document: Path) -> str:
    """The text of a document with every block between `table` and `end` comments made anew."""
    text = document.read_text(encoding="utf-8")
    return TABLE.sub(lambda m: f"<!-- table: primal table {m[1]} -->\n{make_table(m[1])}<!-- end -->", text)


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
    blocks = sum(run_examples(ROOT / name) for name in WHOLE)
    print(f"{len(documents())} documents, {blocks} examples run, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
