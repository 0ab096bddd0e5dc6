"""A network of another package whole and on ranks, which are threads of this process, in float64.

python on_ranks.py NETWORK [--cells 6 6 7] [--train], with the Python of an environment that has the package, and the
repository and `examples/` on its path. Prints a line of JSON for each number of ranks, 0 for the plain module on the
whole crystal. `off`: the largest differences from it in energy, forces and stress (CHGNet: and magnetic moments), each
relative to the largest value. With `--train` they are those of the loss before a step of fine-tuning, of the loss after
it, and of gradients (of the worst parameter). `GiB`: the most memory of the process so far, of all ranks together.
`--turns 20`: milliseconds of such a step, plain and on one rank. `--same-bits STEPS` [--float32]: one hash of losses,
gradients and parameters of so many of these steps for each number of ranks, on parts drawn at random and of METIS; with
`--launched` on the ranks that a launcher has started (gloo by torchrun, MPI by mpiexec), not on threads.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import resource
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

import ase.build
import torch
import torch.nn.functional as F

from domainpar import World, parallelize, split_graph
from domainpar.testing import run_ranks


def crystal(cells: list[int], fluorite: bool = False) -> Any:
    """Rock salt with atoms out of place, 8 atoms a cell; or fluorite, 3 atoms a cell."""
    salt = ase.build.bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    atoms = (ase.build.bulk("CaF2", "fluorite", a=5.46) if fluorite else salt) * cells
    atoms.rattle(0.1, seed=0)
    return atoms


def doubled(value: Any) -> Any:
    """A copy of a tensor, in float64 if it has floats."""
    return value.detach().clone().double() if torch.is_tensor(value) and value.is_floating_point() else value


def of_dictionaries(name: str, atoms: Any) -> tuple[Any, Any, Any]:
    """A network that takes a dictionary of tensors, its inputs whole or of a part, and its call."""
    import atoms as example

    network, graph_of, call = nequip(atoms) if name == "nequip" else getattr(example, name)(None, atoms)
    whole = {key: doubled(value) for key, value in graph_of(atoms).items()}

    def inputs(world: Any, partitioner: Any = "hilbert", dtype: torch.dtype = torch.float64) -> Any:
        graph = {
            key: value.clone() if not torch.is_tensor(value) or not value.is_floating_point() else value.to(dtype)
            for key, value in whole.items()
        }
        if world is None:
            return graph, None
        part = split_graph(graph["edge_index"], len(atoms), world, partitioner=partitioner, position=atoms.positions)
        graph |= {key: part.nodes(graph[key]) for key in (*example.NODES, "atom_types") if key in graph}
        graph |= {key: part.edges(graph[key]) for key in (*example.EDGES, "edge_cell_shift") if key in graph}
        return graph | {"edge_index": part.edge_index}, part

    return network, inputs, call


def nequip(atoms: Any) -> tuple[Any, Any, Any]:
    """NequIP with drawn weights: its package ships none."""
    from nequip.data import compute_neighborlist_
    from nequip.model import NequIPGNNModel
    from nequip.utils.global_state import set_global_state

    set_global_state()
    kinds = sorted(set(atoms.get_chemical_symbols()))
    network = NequIPGNNModel(
        seed=0, model_dtype="float64", r_max=5.0, type_names=kinds, num_layers=2, l_max=2, num_features=16,
        avg_num_neighbors=20.0, per_type_energy_scales=1.0, per_type_energy_shifts=dict.fromkeys(kinds, -1.0),
    )  # fmt: skip

    def graph_of(atoms: Any) -> Any:
        given = {"pos": torch.from_numpy(atoms.positions), "cell": torch.from_numpy(atoms.cell.array)[None],
                 "pbc": torch.ones(1, 3, dtype=torch.bool),
                 "atom_types": torch.tensor([kinds.index(kind) for kind in atoms.get_chemical_symbols()])}  # fmt: skip
        return compute_neighborlist_(given, r_max=5.0)

    def call(network: Any, graph: Any) -> Any:
        out = network(graph)
        return out["total_energy"], out["forces"], out["stress"]

    return network.eval(), graph_of, call


def chgnet(atoms: Any) -> tuple[Any, Any, Any]:
    """CHGNet with the weights that its package ships: atoms, directed bonds, bonds, and angles that join bonds."""
    from chgnet.graph.crystalgraph import CrystalGraph
    from chgnet.model import CHGNet
    from pymatgen.io.ase import AseAtomsAdaptor

    network = CHGNet.load(verbose=False, use_device="cpu")
    for name, module in list(sys.modules.items()):
        if name.startswith("chgnet") and hasattr(module, "TORCH_DTYPE"):
            module.TORCH_DTYPE = torch.float64
    made = vars(network.graph_converter(AseAtomsAdaptor.get_structure(atoms)))
    fields = {name: doubled(value) for name, value in made.items() if torch.is_tensor(value)}
    fields |= {name: made[name] for name in ("atom_graph_cutoff", "bond_graph_cutoff")}
    directed, bond = ("atom", "directed", "atom"), ("atom", "bond", "atom")
    angle = (bond, "angle", bond)

    def inputs(world: Any) -> Any:
        graph = CrystalGraph(
            **{key: value.clone() if torch.is_tensor(value) else value for key, value in fields.items()}
        )
        for of_gradient in (graph.atom_frac_coord, graph.lattice):
            of_gradient.requires_grad_()
        if world is None:
            return graph, None
        ends = graph.atom_graph.long().T.flip(0)
        bonds, angles = ends[:, graph.undirected2directed.long()], graph.bond_graph[:, [3, 1]].long().T
        part = split_graph({directed: ends, bond: bonds, angle: angles}, {"atom": len(atoms)}, world,
                           partitioner="hilbert", position={"atom": atoms.positions})  # fmt: skip
        for key in ("atomic_number", "atom_frac_coord"):
            setattr(graph, key, part.nodes(getattr(graph, key)))
        for key, kind in {"atom_graph": directed, "neighbor_image": directed, "directed2undirected": directed,
                          "undirected2directed": bond, "bond_graph": angle}.items():  # fmt: skip
            setattr(graph, key, part.edges(getattr(graph, key), kind))
        return graph, part

    def call(network: Any, graph: Any) -> Any:
        out = network([graph], task="efsm")
        return out["e"], out["f"][0], out["s"][0], out["m"][0]

    return network, inputs, call


class Fitting:
    """Fine-tuning by SGD on the energy of an atom, to zero, and on forces, to a target [N, 3]."""

    def __init__(self, network: Any, graph: Any, call: Any, target: Any) -> None:
        self.parameters = [parameter.requires_grad_() for parameter in network.train().parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4)
        self.network, self.graph, self.call, self.target = network, graph, call, target

    def loss(self) -> Any:
        energy, forces = self.call(self.network, copy.copy(self.graph))[:2]
        return (energy.sum() / len(self.target)) ** 2 + F.mse_loss(forces, self.target)

    def step(self) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss

    def results(self) -> list[Any]:
        """The loss before a step and after it, and the gradients of all parameters."""
        return [self.step(), self.loss(), *(one.grad for one in self.parameters if one.grad is not None)]


def in_turns(networks: list[Any], inputs: Any, call: Any, target: Any, turns: int) -> dict[str, float]:
    """Medians of CPU milliseconds of a step of fine-tuning, plain and placed on one rank, which take turns."""
    (graph, _), world = inputs(None), World.alone()
    rows, part = inputs(world)
    plain = Fitting(networks.pop(), graph, call, target)
    placed = Fitting(parallelize(networks.pop(), world), rows, call, part.nodes(target))
    seconds: dict[str, list[float]] = {"plain": [], "placed": []}
    for turn in range(turns + 2):
        for name, fitting in {"plain": plain, "placed": placed}.items():
            begin = time.process_time()
            fitting.step()
            seconds[name] += [time.process_time() - begin] if turn > 1 else []  # the first two warm up
    medians = {name: 1000 * statistics.median(each) for name, each in seconds.items()}
    return medians | {"ratio": medians["placed"] / medians["plain"]}


def trained(
    world: Any, network: Any, inputs: Any, call: Any, target: Any, how: Any, steps: int, same_bits: bool
) -> str:
    """A hash of the losses and gradients of some steps of fine-tuning and of the parameters after them."""
    graph, part = inputs(world, how, target.dtype)
    network = parallelize(copy.deepcopy(network), world, same_bits=same_bits)
    fitting, bits = Fitting(network, graph, call, part.nodes(target)), hashlib.sha256()
    for _ in range(steps):
        loss = part.whole(fitting.step().detach())
        for one in (loss, *(one.grad for one in fitting.parameters if one.grad is not None)):
            bits.update(one.numpy().tobytes())
    for one in fitting.parameters:
        bits.update(one.detach().numpy().tobytes())
    return bits.hexdigest()[:16]


def print_hashes(network: Any, inputs: Any, call: Any, target: Any, sizes: list[int], steps: int) -> None:
    """One line for each number of ranks and kind of parts, with the same bits asked for and without.

    No sizes: the ranks are those of a launcher.
    """
    draw = torch.Generator().manual_seed(2)
    with World.session() if not sizes else nullcontext() as world:
        # Without them first: once they are asked for, a world keeps to them.
        for same_bits, size in itertools.product((False, True), sizes or [world.size]):
            drawn = torch.randint(0, size, (len(target),), generator=draw).numpy()
            for kind, how in {"random": drawn, "metis": "metis"}.items():
                given = network, inputs, call, target, how, steps if same_bits else 1, same_bits
                found = {trained(world, *given)} if world else set(run_ranks(trained, size, *given, timeout=3000))
                assert len(found) == 1
                if world is None or world.is_root:
                    print(
                        json.dumps({"ranks": size, "parts": kind, "same_bits": same_bits, "hash": found.pop()}),
                        flush=True,
                    )


def on_rank(world: Any, networks: list[Any], inputs: Any, call: Any, target: Any) -> tuple[list[Any], int]:
    """The results of one rank, whole, and how many atoms it owns; with a target of forces those of a training step."""
    graph, part = inputs(world)
    network = parallelize(networks[world.rank], world)
    results = call(network, graph) if target is None else Fitting(network, graph, call, part.nodes(target)).results()
    return [part.whole(result.detach()) for result in results], next(iter(part.axes.values())).length


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=["mace", "sevennet", "chgnet", "nequip"])
    parser.add_argument("--cells", type=int, nargs=3, default=[2, 2, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--same-bits", type=int, metavar="STEPS")
    parser.add_argument("--launched", action="store_true", help="with --same-bits: on the ranks of a launcher")
    parser.add_argument("--float32", action="store_true", help="with --same-bits")
    parser.add_argument("--turns", type=int, help="of a step of the plain module and of one rank, 81 atoms of fluorite")
    options = parser.parse_args()
    name, turns = options.network, options.turns
    if name in ("sevennet", "chgnet"):  # these cast to float32 on the way, and the comparison is to be in float64
        torch.Tensor.float = torch.Tensor.double
    atoms = crystal([3, 3, 3], fluorite=True) if turns else crystal(options.cells)
    network, inputs, call = chgnet(atoms) if name == "chgnet" else of_dictionaries(name, atoms)
    if options.same_bits:
        dtype = torch.float32 if options.float32 else torch.float64
        torch.set_default_dtype(dtype)
        target = torch.randn(len(atoms), 3, generator=torch.Generator().manual_seed(1))
        sizes = [] if options.launched else options.ranks
        print_hashes(network.to(dtype), inputs, call, target, sizes, options.same_bits)
        return
    torch.set_default_dtype(torch.float64)
    networks = [copy.deepcopy(network.double()) for _ in range(1 + sum(options.ranks))]
    drawn = torch.randn(len(atoms), 3, generator=torch.Generator().manual_seed(1))
    if turns:
        print(json.dumps(in_turns(networks, inputs, call, drawn, turns)))
        return
    target = drawn if options.train else None
    wanted: list[Any] = []
    for size in (0, *options.ranks):
        begin = time.perf_counter()
        if size:
            mine = [networks.pop() for _ in range(size)]
            ranks = run_ranks(on_rank, size, mine, inputs, call, target, timeout=3000)
            off = [max(float((ours[at] - one).abs().max() / one.abs().max()) for ours, _ in ranks)
                   for at, one in enumerate(wanted)]  # fmt: skip
            found = {"off": [*off[:2], max(off[2:])] if options.train else off, "owned": [owned for _, owned in ranks]}
        else:
            given = networks.pop(), inputs(None)[0]
            results = call(*given) if target is None else Fitting(*given, call, target).results()
            wanted = [result.detach() for result in results]
            del given, results  # and with them all that backward would need
            found = {"first": float(wanted[0]), "second": float(wanted[1].abs().max())}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"ranks": size, **found, "seconds": time.perf_counter() - begin, "GiB": memory}), flush=True)


if __name__ == "__main__":
    main()
