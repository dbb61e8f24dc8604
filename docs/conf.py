"""Sphinx configuration. `make docs` builds the site; `PRIMAL_DOCS_ONLINE=1` adds links into other projects' pages."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from primal_attention import __version__  # noqa: E402

project = "primal-attention"
author = "The primal-attention authors"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
if os.environ.get("PRIMAL_DOCS_ONLINE"):  # reads inventories over the network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "sklearn": ("https://scikit-learn.org/stable", None),
    }

source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
highlight_language = "text"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_use_rtype = False
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = f"primal-attention {release}"
html_show_sourcelink = False
html_favicon = "img/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
toc_object_entries_show_parents = "hide"  # short names in the sidebar
html_context = {"default_mode": "auto"}
html_theme_options: dict[str, Any] = {
    "logo": {"text": project},
    "navigation_with_keys": False,
    # Not on the pages of results, whose tables are wide.
    "secondary_sidebar_items": {page: ["page-toc"] for page in ("guide/**", "reference/**", "notes/**")},
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


MARKUP = re.compile(r"(?<!\\)([|*]|(?<=\w)_(?=[).,;]))")  # outside code


def escape_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show docstrings as they are written: one backtick marks code, a bar is a bar, and `name_` is no link."""
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>> ", "... ")):
            continue
        line = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
        parts = re.split(r"(``.*?``)", line)
        lines[i] = "".join(p if p.startswith("``") else MARKUP.sub(r"\\\1", p) for p in parts)


def setup(app: Any) -> None:
    # Before napoleon, which runs at the default priority and writes markup of its own.
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)
