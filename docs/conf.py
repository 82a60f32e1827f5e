"""Sphinx: `pip install -e '.[docs]'`, then `sphinx-build docs docs/_build`."""

project = "gasloc_p2p"
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["_build", "benchmarks"]
myst_heading_anchors = 3
# README.md and bootstrap/ lie outside of the documentation's folder.
suppress_warnings = ["myst.xref_missing"]
