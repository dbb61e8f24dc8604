"""Keep the documents true: run the Python blocks that stand on their own, in order, and look up every relative link.

.venv/bin/python docs/check.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANY_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
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


def main() -> int:
    failures = [f"{d.relative_to(ROOT)}: nothing at {target}" for d in documents() for target in broken_links(d)]
    for failure in failures:
        print(failure, file=sys.stderr)
    blocks = sum(run_examples(ROOT / name) for name in WHOLE)
    print(f"{len(documents())} documents, {blocks} examples run, {len(failures)} broken links")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
