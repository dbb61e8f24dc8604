"""Keep the documents true: run the README's Python blocks, in order, and look up every relative link.

.venv/bin/python docs/check.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANY_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def broken_links(document: Path) -> list[str]:
    """Relative links of a document that lead nowhere."""
    text = ANY_BLOCK.sub("", document.read_text(encoding="utf-8"))
    targets = {link.partition("#")[0] for link in LINK.findall(text) if "://" not in link and not link.startswith("#")}
    return sorted(target for target in targets if not (document.parent / target).exists())


def run_examples(document: Path) -> int:
    """Run a document's Python blocks in one namespace, as a reader would type them; their number."""
    text = document.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = list(PYTHON_BLOCK.finditer(text))
    for block in blocks:
        line = text.count("\n", 0, block.start(1))  # so that an error shows the document's own line
        exec(compile("\n" * line + block.group(1), str(document), "exec"), namespace)
    return len(blocks)


def main() -> int:
    failures = [f"{d.relative_to(ROOT)}: no file at {target}" for d in documents() for target in broken_links(d)]
    for failure in failures:
        print(failure, file=sys.stderr)
    blocks = run_examples(ROOT / "README.md")
    print(f"{len(documents())} documents, {blocks} examples run, {len(failures)} broken links")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
