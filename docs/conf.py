"""How Sphinx builds these pages: MyST Markdown, every warning an error (`make docs`)."""

from __future__ import annotations

import tomllib
from pathlib import Path

project = "callqueue"
author = "callqueue contributors"
copyright = author
pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
release = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "**/_*.md"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

html_theme = "alabaster"
html_title = f"callqueue {release}"
html_theme_options = {
    "description": "API calls, exactly as fast as the limits allow",
    "page_width": "1100px",
}
html_extra_path = ["llms.txt"]
html_show_sourcelink = False
html_copy_source = False
