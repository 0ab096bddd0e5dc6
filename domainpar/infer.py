"""Score every edge of whole events with a trained network: each edge once, in the order of the user's own files.

Writes one zarr zip an event: hit_id, edge_index (rows into hit_id), edge_logit, edge_score, edge_scored.

Examples:
  python -m domainpar.infer                                        the newest run, on its own events
  mpiexec -n 8 python -m domainpar.infer --run runs/0001 --store stores/full --out scores
  python -m domainpar.infer --run runs/0001 --split val --checkpoint last
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from domainpar.command_line import parse, run_command
from domainpar.config import ConfigError, InferConfig, TrainConfig, target_conditions

if TYPE_CHECKING:
    from domainpar.parallel.world import World
    from domainpar.reco.scoring import Outcome, Scorer

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Score events as the command line says; returns the exit code. Collective."""
    return run_command(InferConfig, _work, __doc__, argv)


def infer(config: InferConfig, world: "World") -> None:
    """Score the events of a store with the network of a run, and show how it goes. *Collective*.

    Raises:
        Refused: On all ranks alike, before anything was written, if run, events or output directory will not do.
        RuntimeError: If an edge of an event did not get exactly one score.
    """
    from tqdm import tqdm

    from domainpar.reco import summary
    from domainpar.reco.score_files import choose_directory, write_list
    from domainpar.training.rundir import newest_run
    from domainpar.training.trained import read_run

    run = Path(world.on_root(lambda: config.run or str(newest_run())))
    trained = _on_all(world, lambda: _training_config(run))
    path = Path(config.store or _on_all(world, lambda: _store_of_run(run, read_run(run))))
    scorer, about = _make_scorer(config, run, trained, path, world)
    records = scorer.store.events(None if config.split == "all" else config.split)
    world.agree(None if records else f"{path} has no {config.split} events; take another --split.")
    world.on_root(lambda: str(choose_directory(scorer.directory, config.overwrite)))
    lines = summary.first_lines(scorer, records, run, about) if world.is_root else []
    outcomes: list[Outcome] = []
    with tqdm(total=len(records), unit="event", disable=None if world.is_root else True) as bar:
        for finished in scorer.rounds(records):
            outcomes += finished
            lines += [summary.event_line(outcome) for outcome in finished]
            while world.is_root and lines:
                bar.write(lines.pop(0))
            bar.update(len(finished))
    if world.is_root:
        in_order = sorted(outcomes, key=lambda outcome: [record.event for record in records].index(outcome.scored.event))
    ...
