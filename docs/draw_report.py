"""Draw the pictures of a run that docs/ shows.

python docs/draw_report.py RUN NAIVE_RUN docs (needs matplotlib: pip install '.[report]')

Those in the repository are of the first network of docs/tutorial.md, beside one that was trained on eight sectors of
each event, with as many edges a step and as many steps. In the folder of the tutorial:

    FLAGS="--store stores/tutorial --config target.yaml --hidden 32 --epochs 60 --mode naive --sectors 8"
    mpiexec -n 2 python -m domainpar.train $FLAGS --events-per-step 8 --out runs/sectors
    FLAGS="--split test --tracks greedy --tune --matching-style two_way --overwrite"
    mpiexec -n 2 python -m domainpar.infer --run runs/small $FLAGS
    mpiexec -n 2 python -m domainpar.infer --run runs/sectors --mode naive --sectors 8 $FLAGS
    python ../docs/draw_report.py runs/small runs/sectors ../docs
"""

import sys
import tempfile
from pathlib import Path

from domainpar.tracking.display.pictures import draw_pictures
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.display.sections import build_page

SHOWN = ("track-efficiency", "borders", "event-parts", "event-tracks")
PARTS = 8


def draw(run: Path, naive: Path, directory: Path) -> None:
    """Write the pictures that are shown as `report-<name>.png`."""
    page = build_page(read_run_files(run), read_run_files(naive), num_parts=PARTS)
    with tempfile.TemporaryDirectory() as folder:
        for path in draw_pictures(page, Path(folder)):
            if path.stem in SHOWN:
                (directory / f"report-{path.name}").write_bytes(path.read_bytes())


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python docs/draw_report.py RUN NAIVE_RUN DIRECTORY")
    draw(*map(Path, sys.argv[1:]))
