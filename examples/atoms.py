"""A large crystal on several ranks: an ASE calculator of MACE or SevenNet, as pip installs them, and some steps of it.

pip install mace-torch   or   pip install sevenn: one environment for each, since their pins differ. Then
`torchrun --nproc-per-node 2 examples/atoms.py --network sevennet`, or `python` for one rank.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import ase.build
import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator, all_changes
from ase.md.verlet import VelocityVerlet

from domainpar import World, parallelize, split_graph

NODES = ("positions", "node_attrs", "batch", "pos", "x", "atomic_numbers", "node_attr")
EDGES = ("shifts", "unit_shifts", "edge_vec", "pbc_shift")  # a row for each edge; all else is the same on every rank


class OverRanks(Calculator):
    """ASE's calculator of a network over ranks: each holds its atoms and the edges that end at them. *Collective*.

    Args:
        network: The network of another package, which stays as it is.
        graph_of: Makes its input of atoms, tensors by name.
        call: Calls it, and returns energy, forces [N, 3] and stress [6] in ASE's units and order.
        world: The ranks.
    """

    implemented_properties = ("energy", "forces", "stress")

    def __init__(self, network: Any, graph_of: Callable[..., Any], call: Callable[..., Any], world: World) -> None:
        super().__init__()
        self.network, self.graph_of, self.call, self.world = parallelize(network, world), graph_of, call, world

    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        graph = self.graph_of(self.atoms)
        where = self.atoms.get_positions(wrap=True)  # along a curve through the cell: owners stay as atoms move
        part = split_graph(graph["edge_index"], len(where), self.world, partitioner="hilbert", position=where)
        rows = {name: part.nodes(graph[name]) for name in NODES if name in graph}
        rows |= {name: part.edges(graph[name]) for name in EDGES if name in graph} | {"edge_index": part.edge_index}
        energy, forces, stress = (part.whole(x.detach()).cpu().numpy() for x in self.call(self.network, graph | rows))
        self.results = {"energy": energy.item(), "forces": forces.astype(float), "stress": stress.astype(float)}


def mace(path: str | None, atoms: Atoms) -> tuple[Any, ...]:
    """A model file of MACE, or one with drawn weights: its package ships none."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # e3nn 0.4 loads a table of its own by pickle when imported
    from e3nn import o3
    from mace import data, modules
    from mace.tools import AtomicNumberTable
    from mace.tools.torch_geometric import Batch

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    kinds, block = sorted(set(atoms.numbers.tolist())), modules.RealAgnosticResidualInteractionBlock
    network = torch.load(path, weights_only=False) if path else modules.ScaleShiftMACE(
        r_max=5.0, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, interaction_cls=block, interaction_cls_first=block,
        num_interactions=2, num_elements=len(kinds), hidden_irreps=o3.Irreps("16x0e + 16x1o"), gate=torch.nn.SiLU(),
        MLP_irreps=o3.Irreps("16x0e"), atomic_energies=np.linspace(-3, -1, len(kinds)), avg_num_neighbors=20.0,
        atomic_numbers=kinds, correlation=3, atomic_inter_scale=1.0, atomic_inter_shift=0.0)  # fmt: skip
    network, table = network.double().eval().requires_grad_(False), AtomicNumberTable(network.atomic_numbers.tolist())

    def graph_of(atoms: Atoms) -> dict[str, Any]:
        made = data.AtomicData.from_config(data.config_from_atoms(atoms), table, float(network.r_max))
        return dict(Batch.from_data_list([made]).to_dict())

    def call(network: Any, graph: Any) -> tuple[Any, ...]:
        out = network(graph, training=network.training, compute_stress=True)
        return out["energy"], out["forces"], out["stress"].reshape(9)[[0, 4, 8, 5, 2, 1]]

    return network, graph_of, call


def sevennet(path: str | None, atoms: Atoms) -> tuple[Any, ...]:
    """A checkpoint of SevenNet, or SevenNet-0 with the weights that its package ships."""
    from sevenn.atom_graph_data import AtomGraphData
    from sevenn.train.dataload import unlabeled_atoms_to_graph
    from sevenn.util import load_checkpoint

    checkpoint = load_checkpoint(path or "7net-0")
    network = checkpoint.build_model().eval().requires_grad_(False)
    network.set_is_batch_data(False)

    def graph_of(atoms: Atoms) -> dict[str, Any]:
        made = unlabeled_atoms_to_graph(atoms, checkpoint.config["cutoff"], with_shift=True)
        return dict(AtomGraphData.from_numpy_dict(made).to_dict())

    def call(network: Any, graph: Any) -> tuple[Any, ...]:
        out = network(AtomGraphData(**graph))
        return out["inferred_total_energy"], out["inferred_force"], -out["inferred_stress"][[0, 1, 2, 4, 5, 3]]

    return network, graph_of, call


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=["mace", "sevennet"], default="mace")
    parser.add_argument("--model", help="a file of the network; default: drawn weights of MACE, SevenNet-0")
    parser.add_argument("--cells", type=int, nargs=3, default=[3, 3, 3], help="of rock salt, 8 atoms each")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    crystal = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True) * options.cells
    crystal.rattle(0.1, seed=0)
    with World.session() as world:
        crystal.calc = OverRanks(*globals()[options.network](options.model, crystal), world)
        dynamics, begin = VelocityVerlet(crystal, 2 * units.fs), time.perf_counter()
        for step in range(options.steps + 1):
            energy, largest = crystal.get_potential_energy(), float(np.abs(crystal.get_forces()).max())
            begin, seconds = time.perf_counter(), time.perf_counter() - begin
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB, the largest so far, all included
            if world.is_root:
                print(f"step {step}, {len(crystal)} atoms: energy {energy!r} eV, largest force {largest!r} eV/A, "
                      f"{seconds:.2f} s, {memory:.2f} GiB on rank 0")  # fmt: skip
            dynamics.run(1)
