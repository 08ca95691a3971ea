"""The site: `python -m sphinx -W docs docs/_site` builds it, and `python -m http.server -d docs/_site` serves it.

Pages are Markdown. Sphinx takes docstrings for reStructuredText, which `of_docstring` makes of their plain text.
"""

import re
from typing import Any

import effops

project = "effops"
author = "the effops authors"
release = effops.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site"]
default_role = "code"  # what stands between single backticks in a docstring
smartquotes = False
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types stand in the signature's text, and arguments tell shapes
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]  # lines of code have up to 120 characters
html_title = f"effops {release}"
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": False}

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Source|Note):")


def of_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Formulas, which are indented paragraphs outside of sections, become literal blocks. A bar is no substitution."""
    written: list[str] = []
    is_section = is_formula = False
    for line in lines:
        is_section = bool(SECTION.match(line)) or (is_section and (not line or line.startswith(" ")))
        starts = line.startswith("    ") and not is_section and not is_formula and bool(written) and not written[-1]
        if starts:
            written += ["::", ""]
        is_formula = not is_section and (starts or (is_formula and (not line or line.startswith(" "))))
        written.append(line if is_formula else line.replace("|", "\\|"))
    lines[:] = written


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", of_docstring, priority=400)  # before napoleon
