"""Execute the notebooks in a Jupyter kernel, in the order in which they are to be read."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from megatron_chameleon.artifacts import Mixture

NOTEBOOKS = Path(__file__).resolve().parents[3] / "docs/notebooks"
IN_ORDER = ("a_mixture_in_five_minutes", "reading_a_report")


@pytest.mark.slow
def test_notebooks_run_from_an_empty_folder(tmp_path):
    for name in IN_ORDER:
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        where = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=None, resources=where).execute()
    run = tmp_path / "runs/notebook"
    for mode in ("pretrain", "finetune"):
        assert len(Mixture.load(run / f"4-mixture/chameleon-{mode}.json").weights) == 6
    assert (run / "7-report/report.html").is_file()
