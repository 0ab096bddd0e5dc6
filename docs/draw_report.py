"""Draw the pictures of a run that the README shows.

python docs/draw_report.py RUN docs (needs matplotlib and plotly: pip install '.[report]')

Those in the repository are of simulated events. One network is trained on whole events, and scores events that it has
not seen twice: whole, and cut into sectors.

    python -m domainpar.prepare --events 26 --hits 50000 --store STORE
    mpiexec -n 2 python -m domainpar.train --store STORE --epochs 80 --max-steps 1000 --hidden 32 --true-weight 2 \\
        --lr 5e-3 --out RUN
    python -m domainpar.infer --run RUN --split test --tracks walk --classical
    python -m domainpar.infer --run RUN --split test --tracks walk --mode naive --sectors 8 --out RUN/scores-naive

A run that was trained on sectors can lie beside it instead: python docs/draw_report.py RUN docs NAIVE_RUN
"""

import sys
import tempfile
from pathlib import Path

from domainpar.display.pictures.drawing import draw_pictures
from domainpar.display.reading import RunFiles, read_run_files

SHOWN = ("track-efficiency", "borders", "event-parts", "event-tracks")
PARTS = 8


def draw(run: RunFiles, naive: RunFiles, directory: Path) -> None:
    """Write the pictures that are shown as `report-<name>.png`."""
    with tempfile.TemporaryDirectory() as folder:
        for path in draw_pictures(run, Path(folder), naive, num_parts=PARTS):
            if path.stem in SHOWN:
                (directory / f"report-{path.name}").write_bytes(path.read_bytes())


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python docs/draw_report.py RUN DIRECTORY [NAIVE_RUN]")
    place, *other = Path(sys.argv[1]), *map(Path, sys.argv[3:])
    beside = read_run_files(other[0]) if other else read_run_files(place, scores=place / "scores-naive")
    draw(read_run_files(place), beside, Path(sys.argv[2]))
