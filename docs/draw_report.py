"""Draw the pictures of a run that the README shows.

python docs/draw_report.py RUN NAIVE_RUN docs (needs matplotlib: pip install '.[report]')

Those in the repository are of simulated events at half the density of TrackML's: one network trained on whole events,
one on eight sectors of each, with as many edges a step and as many steps; 24 events that neither has seen.

    python -m domainpar.prepare --events 26 --hits 50000 --val-split 0.08 --test-split 0.16 --store STORE
    python -m domainpar.prepare --events 25 --hits 50000 --seed 900 --val-split 0 --test-split 0.96 --store TEST
    FLAGS="--store STORE --epochs 80 --max-steps 1000 --hidden 32 --true-weight 2 --lr 5e-3"
    python -m domainpar.train $FLAGS --out RUN
    python -m domainpar.train $FLAGS --mode naive --sectors 8 --events-per-step 8 --out NAIVE_RUN
    FLAGS="--store TEST --split test --checkpoint last --tracks grow --matching-style two_way"
    python -m domainpar.infer $FLAGS --run RUN --classical
    python -m domainpar.infer $FLAGS --run NAIVE_RUN --mode naive --sectors 8
"""

import sys
import tempfile
from pathlib import Path

from domainpar.display.pictures import draw_pictures
from domainpar.display.run_files import read_run_files
from domainpar.display.sections import build_page

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
