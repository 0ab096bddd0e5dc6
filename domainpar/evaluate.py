"""Compare tracks of any finder with truth, by the metrics of `infer`: efficiency, fake rate, duplicates.

Tracks come as a table of hits (event_id, hit_id, track_id), in one file for all events or in one file per event, as
files of ACTS, acorn or ColliderML, or are found by ACTS now (--compare acts). The time that the finder took is printed
for ACTS alone; of files it is not known.

Examples:
  python -m domainpar.evaluate tracks.csv --store stores/mine      the test events of a store
  python -m domainpar.evaluate 'acts/event*-tracks_ambi.csv' --name acts --store stores/mine --split all
  python -m domainpar.evaluate tracks.parquet --store stores/pixel --preset pixel --matching-style atlas
  python -m domainpar.evaluate --compare acts --input acts/ttbar-200 --store stores/acts-ttbar-200
  python -m domainpar.evaluate tracks.csv --name mine --scores runs/0001    beside the network of this run
"""

import sys
from collections.abc import Sequence

from domainpar.parallel.launcher import started_as_root
from domainpar.tracking.command_line import refuse_like_flags, run_command
from domainpar.tracking.config import EvaluateConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Count tracks as the command line says; returns the exit code. Under a launcher the first rank does it all."""
    return run_command(EvaluateConfig, _work, __doc__, argv)


def _work(config: EvaluateConfig) -> int:
    if started_as_root():
        from domainpar.tracking.scoring.external_tracks import evaluate

        with refuse_like_flags("evaluate"):
            print(*evaluate(config), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
