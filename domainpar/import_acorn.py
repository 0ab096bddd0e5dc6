"""Import a trained interaction network of acorn: its checkpoint becomes a run, for infer, train --init and export.

The file is read by an allow-list, and no code in it is executed. Options that are not supported are refused by name.

Examples:
  python -m domainpar.import_acorn artifacts/gnn.ckpt              runs/0001, and the commands to go on with
"""

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from domainpar.parallel.launcher import started_as_root
from domainpar.tracking.command_line import refuse_like_flags, run_command
from domainpar.tracking.config import ImportAcornConfig, TrainConfig
from domainpar.tracking.config.train import Network


def main(argv: Sequence[str] | None = None) -> int:
    """Import as the command line says; returns the exit code."""
    return run_command(ImportAcornConfig, _work, __doc__, argv)


def _work(config: ImportAcornConfig) -> int:
    if not started_as_root():  # nothing is shared: the others have nothing to do
        return 0
    with refuse_like_flags("import_acorn"):
        from domainpar.tracking.training.acorn_checkpoint import read_network, write_run

        network = read_network(Path(str(config.checkpoint)))
        trained = TrainConfig(
            standardise=False, model=Network(network.model), hidden=network.hidden, graph_iters=network.graph_iters
        )
        run, sha256 = write_run(network, trained, config.out)
    print(f"imported: {config.checkpoint}, step {network.step}, is {run}")
    print(f"network : {network.model}, hidden {network.hidden}, {network.graph_iters} iterations; sha256 {sha256[:16]}")
    prepare = ["python", "-m", "domainpar.prepare", "--source", "acorn", "--input", "DIRECTORY", "--store", "STORE"]
    print(f"events  : {shlex.join([*prepare, *network.flags])}")
    phi = dict(zip(network.node_features, network.scales["node_scales"])).get("phi", math.pi)
    if network.edge_features and not math.isclose(phi, math.pi, rel_tol=1e-6):
        where = f"acorn wraps differences of phi after its scale, {phi:g}, which is right for pi alone"
        print(f"note    : edge features that files lack differ from acorn's for edges across phi = pi: {where}")
    print(f"go on   : python -m domainpar.infer --run {shlex.quote(str(run))} --store STORE --tracks greedy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
