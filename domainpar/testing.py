"""Run a function on several ranks and get what each returns: for tests of this package and of layers of your own."""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from domainpar.common import timeouts
from domainpar.common.limits import cores_here
from domainpar.measure.programs import LET_OPEN_MPI_START, run_limited
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World

RankTransport = Literal["threads", "gloo", "mpi"]


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    transport: RankTransport = "threads",
    timeout: float = 60.0,
    domain_size: int | None = None,
) -> list[Any]:
    """Call `function(world, *args)` on every rank, with one thread of torch each.

    Ranks as `threads` cost milliseconds. `gloo` and `mpi` start processes and cost seconds, so let one function loop
    over many cases. The results of processes are pickled. Threads share torch's random generator: draw before
    `run_ranks`, or from a generator of your own.

    Args:
        function: The work of a rank. Processes import it by name, so it may be neither a lambda nor nested, and its
            arguments may not be either. One of the script itself is possible if the script calls `run_ranks` under
            `if __name__ == "__main__":`.
        num_ranks: Number of ranks.
        *args: Arguments that every rank gets after the world. With `threads` they are the same objects on all ranks, so
            do not change them.
        transport: `threads`, `gloo` or `mpi`.
        timeout: Seconds after which all ranks are ended. On a busy machine it is longer (`patient`).
        domain_size: Number of ranks that share a graph, as for `World.over`.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        ValueError: If processes cannot import the function.
        TimeoutError: If ranks were still at work after `timeout`.
        Exception: What the first failing rank raised (`threads`), or a RuntimeError with its traceback (processes).
    """
    limit = patient(timeout)
    if transport == "threads":
        return run_threads(function, num_ranks, *args, timeout=limit, domain_size=domain_size)
    _check_importable(function)
    call = pickle.dumps((function, args, domain_size, limit))
    if transport == "gloo":
        return _run_gloo(call, num_ranks, limit)
    if transport == "mpi":
        return _run_mpi(call, num_ranks, timeout)
    raise ValueError(f"unknown transport {transport!r}; run_ranks knows threads, gloo and mpi.")


def patient(seconds: float) -> float:
    """A time limit that is meant for an idle machine, made longer by the load of this one.

    It is multiplied by twice the number of programs that want to run, over the last minute or now, per processor;
    twice, because more of them may come. It never becomes shorter.
    """
    load = os.getloadavg()[0]
    with suppress(OSError):  # of Linux: those that want to run at this moment
        load = max(load, float(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))
    return seconds * max(1.0, 2.0 * load / len(cores_here()))


def _check_importable(function: Callable[..., Any]) -> None:
    """Refuse a function that no process could import, and a script whose ranks would start ranks without end."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    # Python's own mark of a process that reads the script which started it; set in `_mpi_rank`, too.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a rank that reads the script of run_ranks came to run_ranks itself; "
            'write the call under if __name__ == "__main__":'
        )
    if getattr(function, "__module__", None) == "__main__" and script is None:
        raise ValueError(
            f"ranks that are processes cannot import {getattr(function, '__name__', function)}, which was typed and is "
            "in no file; save it as one, or use transport='threads'."
        )


def find_mpiexec() -> str | None:
    """The `mpiexec` that belongs to this Python, else the one on the path; None where there is none or no mpi4py."""
    from importlib.util import find_spec

    if find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _run_gloo(call: bytes, num_ranks: int, timeout: float) -> list[Any]:
    # Not fork: torch's threads do not survive it. Not spawn: every rank would import torch anew.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "domainpar.testing"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_gloo_rank, args=(call, rank, num_ranks, folder, pipes[rank][1]), daemon=True)
            for rank in range(num_ranks)
        ]
        for rank, (_, writer) in zip(ranks, pipes, strict=True):
            rank.start()
            writer.close()  # this process's copy: else the end of a rank that dies would not be noticed
        try:
            results = _collect(ranks, [reader for reader, _ in pipes], timeout)
            for rank in ranks:
                rank.join(timeouts.RANKS_LEAVING)
            return results
        finally:  # also those that hang after their result
            for rank in ranks:
                rank.kill()
                rank.join()


def _gloo_rank(call: bytes, rank: int, num_ranks: int, folder: str, results: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        where = Path(folder, "rendezvous").as_uri()
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=num_ranks)
        function, args, domain_size, timeout = pickle.loads(call)
        world = World.from_process_group(domain_size=domain_size, timeout=timeout)
        results.send((True, pickle.dumps(function(world, *args))))
    except BaseException:
        results.send((False, traceback.format_exc()))
        return
    with suppress(RuntimeError):  # all is said
        world.close()  # nobody leaves while others still talk
        dist.destroy_process_group()


def _collect(ranks: Sequence[BaseProcess], readers: Sequence[Connection], timeout: float) -> list[Any]:
    give_up_at = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = [reader for rank, reader in enumerate(readers) if rank not in results]
        ready = wait(waiting, max(0.0, give_up_at - time.monotonic()))
        if not ready:
            late = [str(rank) for rank in range(len(ranks)) if rank not in results]
            raise TimeoutError(f"rank {', '.join(late)} still at work after {timeout:g} s")
        for rank, reader in enumerate(readers):
            if reader not in ready:
                continue
            try:
                succeeded, content = reader.recv()
            except EOFError:
                ranks[rank].join(1.0)  # its end of the pipe is closed a moment before the exit code is there
                raise RuntimeError(f"rank {rank} ended without a result, exit code {ranks[rank].exitcode}") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank} failed:\n{content}")
            results[rank] = pickle.loads(content)
    return [results[rank] for rank in range(len(ranks))]


def _run_mpi(call: bytes, num_ranks: int, timeout: float) -> list[Any]:
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise RuntimeError("no mpiexec or no mpi4py here; pip install 'domainpar[mpi]' brings both.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call.pkl").write_bytes(call)
        # The script that calls, by its name or path: its functions are read from it, as in processes of Python's own.
        main = multiprocessing.spawn.get_preparation_data("rank")
        needed = b"__main__" in call
        main = {name: main[name] for name in main if needed and name.startswith("init_main")}
        (folder / "main.pkl").write_bytes(pickle.dumps(main))
        command = [mpiexec, "-n", str(num_ranks), sys.executable, "-m", "domainpar.testing", name]
        code, output = run_command(command, timeout)
        errors = [path.read_text() for path in sorted(folder.glob("error_*.txt"))]
        if errors or code != 0:
            raise RuntimeError("\n".join(errors) or f"{' '.join(command)} ended with exit code {code}:\n{output}")
        return [pickle.loads((folder / f"result_{rank}.pkl").read_bytes()) for rank in range(num_ranks)]


def run_command(command: list[str], timeout: float, **environment: str) -> tuple[int, str]:
    """Run a program that starts ranks, with a hard time limit on all of them.

    Args:
        command: The program and its arguments.
        timeout: Seconds after which the program and everything it started is killed; longer on a busy machine
            (`patient`).
        **environment: Variables to add.

    Returns:
        Exit code, and standard output and error together.

    Raises:
        TimeoutError: If the time was not enough; its text holds the output so far.
    """
    defaults = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        **LET_OPEN_MPI_START,
    }
    timeout = patient(timeout)
    ended = run_limited(command, timeout, [defaults | environment])
    if ended.code is None:
        raise TimeoutError(f"{' '.join(command)} still at work after {timeout:g} s:\n{ended.output}")
    return ended.code, ended.output


def _mpi_rank(folder: Path) -> None:
    """One rank of `_run_mpi`, in a process that mpiexec started."""
    multiprocessing.current_process()._inheriting = True  # type: ignore[attr-defined]
    multiprocessing.spawn.prepare(pickle.loads((folder / "main.pkl").read_bytes()))
    multiprocessing.current_process()._inheriting = False  # type: ignore[attr-defined]
    function, args, domain_size, timeout = pickle.loads((folder / "call.pkl").read_bytes())
    torch.set_num_threads(1)
    world = World.launch("mpi", domain_size=domain_size, timeout=timeout)
    try:
        result = pickle.dumps(function(world, *args))
        (folder / f"result_{world.rank}.pkl").write_bytes(result)
    except BaseException:
        (folder / f"error_{world.rank}.txt").write_text(f"rank {world.rank} failed:\n{traceback.format_exc()}")
        world.transport.abort(1)
    world.close()


if __name__ == "__main__":
    _mpi_rank(Path(sys.argv[1]))
