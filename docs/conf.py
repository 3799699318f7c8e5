"""Sphinx: `sphinx-build -W docs docs/_build` with the extra `docs` installed. The pages read as well without it."""

import daskmesh

project = "daskmesh"
release = daskmesh.__version__
extensions = ["myst_parser"]
root_doc = "index"
html_theme = "furo"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# The pages link to each other in their text, to be read on a forge too; a table of contents would say it twice.
suppress_warnings = ["toc.not_included", "myst.xref_missing"]
