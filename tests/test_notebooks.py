"""The notebooks run from the first cell to the last, and what they claim is so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from domainpar.testing import patient

SAID = {
    "first_event": "open first/run/report.html",
    "many_ranks": "8 ranks: parameters ",
    "your_model": "3 ranks: loss",
}
NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_three_and_none_keeps_outputs_that_would_grow_old():
    assert [path.stem for path in NOTEBOOKS] == list(SAID)
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert cells[0]["cell_type"] == "markdown"
        assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_run_one_after_the_other(path, tmp_path):
    if path.stem == "your_model":
        pytest.importorskip("torch_geometric")
    if path.stem == "first_event":
        pytest.importorskip("jinja2")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    said = {
        "first_event": "open first/run/report.html",
        "many_ranks": "8 ranks: parameters ",
        "your_model": "3 ranks: loss",
    }
    assert said[path.stem] in done.stdout
