"""Each notebook is that of its script, and runs."""

from __future__ import annotations

import pytest
from nbclient import NotebookClient

from tests.docs.notebooks import SCRIPTS, notebook_of, written


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_is_written_from_its_script(script):
    again = "run: python -m tests.docs.notebooks"
    assert script.with_suffix(".ipynb").read_text() == written(script), again


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_runs(script, tmp_path):
    client = NotebookClient(
        notebook_of(script), timeout=500, resources={"metadata": {"path": tmp_path}}
    )
    outputs = [output for cell in client.execute().cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "the same bits" in text
    assert "OTHER BITS" not in text
