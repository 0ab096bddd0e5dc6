"""How long does a server of an exported network take to answer, and how many requests a second can it?

    python bench/serving.py                                  an event of 1e5 edges, some minutes
    python bench/serving.py --case tiny --hidden 16 --graph-iters 2 --requests 5 --clients 1 2

`examples/serve.py` in a process of its own answers clients, which are threads of this one: each sends the tables of one
whole event, waits for all logits, and asks again. Latency is that of a client, from the first byte sent to the last one
read. Every answer is compared with that of the file run here; the file itself was compared with the network in float64
when it was exported. `network s` is the same file run here without a server. Weights are fresh: times do not depend on
them.
"""

from __future__ import annotations

import argparse
import http.client
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cases
import flags
import measuring
import numpy as np
import psutil
from measuring import Columns, Spread

from domainpar.export import _inputs, export
from domainpar.parallel.world import World
from domainpar.tracking.config import ExportConfig, TrainConfig
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.run import train

SERVER = Path(__file__).parents[1] / "examples" / "serve.py"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    case, results = cases.chosen_case(options), measuring.Results("serving", options)
    with tempfile.TemporaryDirectory() as directory:
        model = exported(case.store, Path(directory) / "run", options)
        import onnxruntime

        how = onnxruntime.SessionOptions()
        how.intra_op_num_threads = 1  # as the server has it
        session = onnxruntime.InferenceSession(model, how, providers=["CPUExecutionProvider"])
        store = EventStore(case.store)
        with store.open(store.events()[0]) as event:
            tables = {name: table.numpy() for name, table in _inputs(event)._asdict().items()}
        feed = {given.name: tables[given.name] for given in session.get_inputs()}
        alone, expected = [], None
        for _ in range(options.requests):
            began = time.perf_counter()
            (expected,) = session.run(None, feed)
            alone.append(time.perf_counter() - began)
        np.savez(body := io.BytesIO(), **feed)
        for clients in options.clients:
            with serving(model, options.at_once) as (port, process):
                row = load(port, body.getvalue(), expected[:, 0], clients, options.requests)
                row["peak_mib"] = peak_mib(process)
            results.add(measured="serving", case=case.name, edges=len(expected), network=Spread.of(alone), **row)
    what = f"{flags.in_words(options)}; {options.at_once} at once in the network"
    results.show("A server of one event a request", COLUMNS, results.rows, what)
    results.end()


COLUMNS: Columns = {
    "event": lambda row: row["case"],
    "edges": lambda row: f"{row['edges']:,}",
    "clients": lambda row: str(row["clients"]),
    "answers": lambda row: str(row["answers"]),
    "a second": lambda row: f"{row['a_second']:.2f}",
    "half s": lambda row: f"{row['half']:.3f}",
    "95 % s": lambda row: f"{row['most']:.3f}",
    "longest s": lambda row: f"{row['longest']:.3f}",
    "network s": lambda row: row["network"].text(),
    "server MiB": lambda row: f"{row['peak_mib']:,.0f}",
    "wrong": lambda row: str(row["wrong"]),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "serving", case="medium")
    flags.add_network(parser)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4], help="at a time")
    parser.add_argument("--requests", type=int, default=20, help="of each client")
    parser.add_argument("--at-once", type=int, default=2, help="of the server")
    return parser.parse_args(argv)


def exported(store: Path, run: Path, options: argparse.Namespace) -> Path:
    """An ONNX file of a network that took one step, compared with our own logits."""
    names = ("model", "hidden", "graph_iters", "dtype")
    network = {name: getattr(options, name) for name in names}
    train(TrainConfig(store=str(store), out=str(run), max_steps=1, **network), store, World.alone())
    return export(ExportConfig(run=str(run), checkpoint="last"))


@contextmanager
def serving(model: Path, at_once: int) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server of a file, and the port it listens at; it is asked to end, and has to."""
    command = [sys.executable, str(SERVER), str(model), "--port", "0", "--at-once", str(at_once)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().split(":")[2]), process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "the server ends when it is asked to"


def load(port: int, body: bytes, expected: Any, clients: int, requests: int) -> dict[str, Any]:
    """Latencies of clients that ask at the same time, and how many answers were others than expected."""

    def ask(_: int) -> list[tuple[float, bool]]:
        answers = []
        for _ in range(requests):
            began = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request("POST", "/", body)
            answer = connection.getresponse()
            content = answer.read()
            seconds = time.perf_counter() - began
            answers.append((seconds, answer.status == 200 and np.array_equal(logits_in(content), expected)))
        return answers

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for of_client in pool.map(ask, range(clients)) for answer in of_client]
    seconds = time.perf_counter() - began
    latencies = np.array([latency for latency, _ in answers])
    half, most, longest = np.quantile(latencies, [0.5, 0.95, 1.0])
    return {
        "clients": clients,
        "answers": len(answers),
        "a_second": len(answers) / seconds,
        "half": float(half),
        "most": float(most),
        "longest": float(longest),
        "wrong": sum(not right for _, right in answers),
    }


def logits_in(content: bytes) -> Any:
    return np.load(io.BytesIO(content))["logits"]


def peak_mib(process: subprocess.Popen[str]) -> float:
    """The most memory that the server held, of Linux."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.is_file():
        return psutil.Process(process.pid).memory_info().rss / 2**20
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    measuring.run(__file__)
