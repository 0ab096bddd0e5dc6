"""Score every edge of whole events with a trained network: each edge once, in the order of the user's own files.

Writes one zarr zip an event: hit_id, edge_index (rows into hit_id), edge_logit, edge_score, edge_scored.

Examples:
  python -m domainpar.infer                                        the newest run, on its own events
  mpiexec -n 8 python -m domainpar.infer --run runs/0001 --store stores/full --out scores
  python -m domainpar.infer --run runs/0001 --split val --checkpoint last
"""

import sys
from collections.abc import Sequence

from domainpar.command_line import run_command
from domainpar.config import InferConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Score events as the command line says; returns the exit code. Collective."""
    return run_command(InferConfig, _work, __doc__, argv)


def _work(config: InferConfig) -> int:
    from domainpar.reco.scores import infer

    return infer(config)


if __name__ == "__main__":
    sys.exit(main())
