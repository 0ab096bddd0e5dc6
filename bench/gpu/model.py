"""What would 1 to 64 GPUs cost? A model on paper: no figure here was measured on a GPU.

    python bench/gpu/model.py [--hidden 64 --iterations 4] [--torch]

With E edges and N nodes of an event, h columns of states, L iterations, P GPUs of which 8 share a node:

    edges of a GPU       e = E / P + c E             c E edges are cut and computed on both sides, if P > 1
    nodes of a GPU       n = N / P,   g = b N ghosts (borders of wedges have the same length, however many there are)
    operations           F = L e (2 h h + 2 h h) + L n (4 h h + 8 h h), and encoders and head; a step takes 4 F:
                         forward, again, and two products for each in backward
    bytes                B = what engines touch, `bytes_of_step`
    compute              T = i max(4 F / R, B / M) / u + K k
    an exchange          X = a + g 4 h / w
    sum of limbs         S = 2 log2(P) a + 2 (P - 1) / P 16 p / w
    step                 T + max(0, 2 L X - o T) + S + H

R, M: operations and bytes a second; u: the share of these that kernels reach; i: imbalance of parts; K launches of k
seconds; a, w: latency and rate of messages, those between nodes once P > 8; p parameters, each 16 bytes of limbs; o:
the share of compute that needs no ghost; H: what the host adds. The engine is that of own kernels, one a perceptron and
direction (`domainpar.nn.fused`); with `--torch` it is plain torch in batches (`domainpar.nn.batchwise`).

What would show that it is wrong: a step of one GPU that is off by more than 1.5 (u, k or bytes); exchanges of some
kilobytes that take more than 2 a (latency); gradients of parameters that leave the caches, which would show as twice
the bytes of own kernels; two GPUs slower than one on the largest event (o or the host's part); or
ghosts that grow with P on a real store (`bench/partition.py` counts them, and b and c come from there).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

from domainpar.words import several

EVENTS = {"0.4M edges": (427_000, 60_000), "1.2M edges": (1_224_025, 110_542), "3M edges": (3_000_000, 270_000)}
GPUS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Machine:
    """An H100 of eight in a node, by its data sheet and public measurements.

    Attributes:
        operations: Of float32, a second.
        bandwidth: Bytes of its memory, a second.
        reached: Share of both that kernels reach.
        launch: Seconds that a small kernel takes at least.
        latency: Seconds of a batch of messages, inside a node and between nodes.
        rate: Bytes a second of messages, inside a node and between nodes.
        host: Seconds that the host adds to a step: control and one wait.
    """

    operations: float = 60e12
    bandwidth: float = 3.0e12
    reached: float = 0.6
    launch: float = 2.5e-6
    latency: tuple[float, float] = (20e-6, 35e-6)
    rate: tuple[float, float] = (200e9, 40e9)
    host: float = 0.5e-3


@dataclass(frozen=True)
class Network:
    """Sizes of an interaction network, edge first, and the way it is computed."""

    hidden: int
    iterations: int
    fused: bool

    @property
    def parameters(self) -> int:
        """About: of 3 h columns into two layers, for edges and nodes of each iteration, encoders and head."""
        return (2 * self.iterations + 2) * 4 * self.hidden**2

    def operations_of_step(self, edges: float, nodes: float) -> float:
        """Floating point operations: 4 times those of the way forward."""
        square = self.hidden**2
        of_edges = 4 * square * self.iterations + 2 * square + 2 * square  # and the second layers of encoder and head
        of_nodes = 12 * square * self.iterations + 2 * square
        return 4.0 * (edges * of_edges + nodes * of_nodes)

    def bytes_of_step(self, edges: float, nodes: float) -> float:
        """Bytes that kernels read and write.

        Plain torch touched 131 GB on 854,270 edges with h = 64, L = 4 (counted on a pretended GPU), in proportion to
        rows, columns and iterations. Own kernels read and write edge states once, forward and backward, and
        gather two rows of node products an edge, of which the cache answers 70 %.
        """
        if not self.fused:
            return 131e9 * edges / 854_270 * self.hidden / 64 * (self.iterations + 1) / 5
        row = 4.0 * self.hidden
        forward = edges * row * (2 + 2 + 2 * 0.3) + nodes * row * 12
        backward = edges * row * (4 + 2 + 4 * 0.3) + nodes * row * 16
        return (self.iterations + 1) * (forward + backward)

    @property
    def launches(self) -> int:
        """Of a step, as counted on a pretended GPU."""
        return 145 * self.iterations // 4 if self.fused else 1090 * self.iterations // 4


def step(machine: Machine, network: Network, event: tuple[float, float], gpus: int) -> float:
    """Seconds of a training step of one event on some GPUs."""
    num_edges, num_nodes = event
    between = gpus > 8
    cut, border, imbalance = (0.004, 0.016, 1.05) if gpus > 1 else (0.0, 0.0, 1.0)
    edges, nodes, ghosts = num_edges / gpus + cut * num_edges, num_nodes / gpus, border * num_nodes
    busy = max(
        network.operations_of_step(edges, nodes + ghosts) / machine.operations,
        network.bytes_of_step(edges, nodes + ghosts) / machine.bandwidth,
    )
    compute = imbalance * busy / machine.reached + network.launches * machine.launch
    if gpus == 1:
        return compute + machine.host
    latency, rate = machine.latency[between], machine.rate[between]
    exchange = latency + ghosts * 4 * network.hidden / rate
    free_of_ghosts = 0.5 if gpus <= 8 else 0.0  # of 16 wedges no tile is without one
    exposed = max(0.0, 2 * network.iterations * exchange - free_of_ghosts * compute)
    limbs = 16.0 * network.parameters
    reduction = 2 * math.log2(gpus) * latency + 2 * (gpus - 1) / gpus * limbs / rate
    return compute + exposed + reduction + machine.host


def table(title: str, seconds: Callable[[str, int], float], ideal: Callable[[float, int], float]) -> None:
    """Milliseconds and efficiency of each event on each number of GPUs."""
    print(
        f"\n{title}\n\n| event | {' | '.join(several(gpus, 'GPU') for gpus in GPUS)} |\n|{' --- |' * (len(GPUS) + 1)}"
    )
    for name in EVENTS:
        cells = []
        for gpus in GPUS:
            taken = seconds(name, gpus)
            cells.append(f"{1e3 * taken:.1f} ms, {ideal(seconds(name, 1), gpus) / taken:.0%}")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    machine, network = Machine(), Network(options.hidden, options.iterations, not options.torch)
    engine = "plain torch in batches" if options.torch else "own kernels"
    print(f"PREDICTION, not measured: training steps of {options.hidden} x {options.iterations}, {engine}, {machine}")
    table(
        "Strong: one event on more GPUs; the share of perfect speed-up",
        lambda name, gpus: step(machine, network, EVENTS[name], gpus),
        lambda alone, gpus: alone / gpus,
    )
    table(
        "Weak: an event that grows with the GPUs; time of one GPU over that of many",
        lambda name, gpus: step(machine, network, (EVENTS[name][0] * gpus, EVENTS[name][1] * gpus), gpus),
        lambda alone, gpus: alone,
    )


if __name__ == "__main__":
    main()
