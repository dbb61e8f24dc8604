"""Check the documents: run their Python blocks, look up links, and compare tables and numbers with their sources.

.venv/bin/python docs/check.py            # check
.venv/bin/python docs/check.py --write    # also write the tables into the documents
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tables

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANY_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
TABLE = re.compile(r"^<!-- table: (.+?) -->\n(.*?)^<!-- end -->", re.DOTALL | re.MULTILINE)
SOURCE = re.compile(r"<!-- source: (.+?) -->", re.DOTALL)
NO_PROSE = re.compile(
    r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|^[#|!][^\n]*|(?:Python|torch|Triton) [\d.]+|\b\d+\.\d+\.\d+\b|η = [\d.]+",
    re.M | re.S,
)
# A measured number: with decimals, or followed by its unit.
MEASURED = re.compile(r"(?<![\w.])(\d[\d,]*\.\d+|\d[\d,]*(?=\s(?:%|points?|times|per cent)))")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# Documents whose sentences have measured numbers of their own tables only, or of a comment `<!-- source: … -->`.
MEASURING = (
    "README.md", "CHANGELOG.md", "docs/index.md", "docs/results/*.md", "docs/notes/dropped.md", "docs/notes/scaling.md",
    "docs/guide/performance.md", "docs/guide/distributed.md", "docs/guide/pretrained-models.md",
)  # fmt: skip
# Documents whose blocks need nothing but each other.
COMPLETE = (
    "README.md",
    "docs/index.md",
    "docs/guide/quickstart.md",
    "docs/guide/choosing.md",
    "docs/guide/compatibility.md",
    "docs/guide/performance.md",
    "docs/guide/time-series.md",
    "docs/guide/masks-and-packing.md",
    "docs/guide/streaming.md",
    "docs/guide/objective.md",
    "docs/guide/kernel-svd.md",
    "docs/guide/language-models.md",
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


def with_tables(document: Path) -> str:
    """The text of a document with every block between `table` and `end` comments generated again."""
    text = document.read_text(encoding="utf-8")
    return TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n{tables.make_table(m[1])}<!-- end -->", text)


def numbers_without_source(document: Path) -> list[str]:
    """Measured numbers in the sentences of a document that none of its sources has, rounded to their digits."""
    text = document.read_text(encoding="utf-8")
    sources = [*(table[2] for table in TABLE.finditer(text)), *SOURCE.findall(text)]
    known = [float(number.replace(",", "")) for source in sources for number in NUMBER.findall(source)]
    prose = NO_PROSE.sub("", ANY_BLOCK.sub("", TABLE.sub("", text)))

    def has_source(number: str) -> bool:
        digits = len(number.partition(".")[2])
        return any(abs(value - float(number.replace(",", ""))) <= 0.5001 * 10**-digits for value in known)

    return [number for number in MEASURED.findall(prose) if not has_source(number)]


def results_without_origin() -> list[str]:
    """Stored results that lack a field of their origin; a value that was not recorded is null."""
    found = []
    for file in sorted(ROOT.glob("results/**/*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        fields, versions = {*result, *result.get("data", ())}, result.get("versions", {})
        lacks = [name for name in ("command", "commit", "dirty", "date") if name not in fields]
        packages = ("python", "torch", "triton", "lightning", "cuda")
        lacks += [f"versions.{name}" for name in packages if name not in versions]
        lacks += [] if fields & {"device", "hardware"} else ["device"]
        lacks += [] if fields & {"sha256", "data_sha256"} else ["data_sha256"]
        found += [f"{file.relative_to(ROOT)}: no {', '.join(lacks)}"] if lacks else []
    return found


def failures(write: bool = False) -> list[str]:
    """Broken links, measured numbers without a source, results without an origin, and tables that are not current.

    `write` renews the tables.
    """
    found = results_without_origin()
    found += [f"{d.relative_to(ROOT)}: nothing at {target}" for d in documents() for target in broken_links(d)]
    for document in (page for pattern in MEASURING for page in sorted(ROOT.glob(pattern))):
        numbers = numbers_without_source(document)
        found += [f"{document.relative_to(ROOT)}: {number} is in no table of the page" for number in numbers]
    for document in documents():
        if (text := with_tables(document)) != document.read_text(encoding="utf-8"):
            if write:
                document.write_text(text, encoding="utf-8")
            else:
                found.append(f"{document.relative_to(ROOT)}: a table is not current: run docs/check.py --write")
    return found


def main() -> int:
    found = failures(write="--write" in sys.argv)
    for failure in found:
        print(failure, file=sys.stderr)
    with contextlib.redirect_stdout(io.StringIO()):
        blocks = sum(run_examples(ROOT / name) for name in COMPLETE)
    print(f"{len(documents())} documents, {blocks} examples run, {len(found)} failures")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
