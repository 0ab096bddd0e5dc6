"""Draw the pictures of a run that docs/ shows.

python docs/draw_report.py RUN NAIVE_RUN docs (needs matplotlib: pip install '.[report]')

Those in the repository are of simulated events at the density of TrackML's, behind the filter of recipes/full.yaml
(STORE, and TEST of other events made alike: `--seed 700 --events 24 --val-split 0 --test-split .99`): one network
trained on whole events, one on eight sectors of each, with as many edges a step and as many steps.

    FLAGS="--store STORE --hidden 32 --graph-iters 4 --epochs 5 --lr 0.005", target and weighting of recipes/full.yaml
    python -m domainpar.train $FLAGS --out RUN
    python -m domainpar.train $FLAGS --mode naive --sectors 8 --events-per-step 8 --out NAIVE_RUN
    FLAGS="--checkpoint last --preset full --tracks greedy --matching-style two_way"
    python -m domainpar.infer $FLAGS --run RUN --tune --split val --out VAL  # NAIVE_RUN alike
    python -m domainpar.infer $FLAGS --run RUN --store TEST --split test
    python -m domainpar.infer $FLAGS --run NAIVE_RUN --mode naive --sectors 8 --store TEST --split test
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
