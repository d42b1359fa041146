"""Notebooks, which are written from scripts: `python -m tests.docs.notebooks` writes all again.

In a script, a line `# %%` begins a cell with code, and `# %% [markdown]` one with text in comments.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from tests.docs.blocks import ROOT

SCRIPTS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebook_of(script: Path) -> nbformat.NotebookNode:
    """Return the notebook of a script, without outputs."""
    parts = re.split(r"^# %%( \[markdown\])?\n", script.read_text(), flags=re.MULTILINE)[1:]
    cells = []
    for number, (kind, text) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        if kind:
            text = re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)  # noqa: PLW2901
        new = nbformat.v4.new_markdown_cell if kind else nbformat.v4.new_code_cell
        cells.append(new(text.strip(), id=f"cell-{number}"))
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def written(script: Path) -> str:
    """Return the text of the file of a notebook."""
    return nbformat.writes(notebook_of(script)) + "\n"


if __name__ == "__main__":
    for path in SCRIPTS:
        path.with_suffix(".ipynb").write_text(written(path))
