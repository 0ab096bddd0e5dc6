"""Run a function on several ranks and get what each returns: for tests of this package and of layers of your own."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from domainpar.common import timeouts
from domainpar.common.agreement import name_ranks
from domainpar.common.limits import cores_here
from domainpar.measure.programs import LET_OPEN_MPI_START, mpiexecs, own_path, run_limited
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World

RankTransport = Literal["threads", "gloo", "mpi"]

_LONGEST_PLACE_OF_SOCKETS = 75  # letters


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    transport: RankTransport = "threads",
    timeout: float = 60.0,
    domain_size: int | None = None,
) -> list[Any]:
    """Call `function(world, *args)` on every rank, with one thread of torch each.

    Ranks as `threads` cost milliseconds; they run in turns, so one that waits for others by means of its own does so
    in `world.transport.elsewhere()`. `gloo` and `mpi` start processes and cost seconds, so let one function loop over
    many cases. The results of processes are pickled. Each rank has a random generator of torch of its own; those
    of threads begin as the caller's is, those of processes as in a new process.

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
    if transport not in ("gloo", "mpi"):
        raise ValueError(f"unknown transport {transport!r}; run_ranks knows threads, gloo and mpi.")
    _check_importable(function)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call.pkl").write_bytes(pickle.dumps((function, args, domain_size, limit)))
        if transport == "gloo":
            _run_gloo(folder, num_ranks, limit)
        else:
            _run_mpi(folder, num_ranks, timeout)
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(num_ranks)]


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
    return next(iter(mpiexecs()), None)


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result_{rank}.pkl"


def _run_gloo(folder: Path, num_ranks: int, timeout: float) -> None:
    # Not fork: torch's threads do not survive it. Not spawn: every rank would import torch anew.
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "torch.distributed", "domainpar.testing"]
    )
    before = tempfile.gettempdir()
    try:
        # The server's socket lies in the temporary folder, at /pymp-xxxxxxxx/listener-xxxxxxxx, and a socket has a name
        # of at most 107 letters. Folders of batch systems are longer.
        tempfile.tempdir = "/tmp" if len(before) > _LONGEST_PLACE_OF_SOCKETS else before
        multiprocessing.forkserver.ensure_running()
    finally:
        tempfile.tempdir = before
    how: dict[str, Any] = {"join": False, "daemon": True, "start_method": "forkserver"}
    ranks = start_processes(_gloo_rank, (folder, num_ranks), num_ranks, **how)
    give_up_at = time.monotonic() + timeout
    try:
        while not ranks.join(max(0.0, give_up_at - time.monotonic()), grace_period=timeouts.ANSWER_POLL):
            if time.monotonic() > give_up_at:
                if late := [rank for rank in range(num_ranks) if not _result(folder, rank).exists()]:
                    raise TimeoutError(f"{name_ranks(late)} still at work after {timeout:g} s")
                return  # all results are there: one hangs while it leaves
    except ProcessRaisedException as failed:
        raise RuntimeError(f"rank {failed.error_index} failed:\n{failed.msg}") from None
    except ProcessExitedException as ended:
        what = f"rank {ended.error_index} ended without a result, exit code {ended.exit_code}"
        raise RuntimeError(what) from None
    finally:
        for rank in ranks.processes:
            rank.kill()
            rank.join()


def _gloo_rank(rank: int, folder: Path, num_ranks: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=rank, world_size=num_ranks)
    function, args, domain_size, timeout = pickle.loads((folder / "call.pkl").read_bytes())
    world = World.from_process_group(domain_size=domain_size, timeout=timeout)
    _result(folder, rank).write_bytes(pickle.dumps(function(world, *args)))
    with suppress(RuntimeError):  # all results are there
        world.close()  # no rank leaves while others still send
        dist.destroy_process_group()


def _run_mpi(folder: Path, num_ranks: int, timeout: float) -> None:
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise RuntimeError("no mpiexec or no mpi4py here; pip install 'domainpar[mpi]' brings both.")
    # The script that calls, by its name or path: its functions are read from it, as in processes of Python's own.
    main = multiprocessing.spawn.get_preparation_data("rank")
    needed = b"__main__" in (folder / "call.pkl").read_bytes()
    main = {name: main[name] for name in main if needed and name.startswith("init_main")}
    (folder / "main.pkl").write_bytes(pickle.dumps(main))
    command = [mpiexec, "-n", str(num_ranks), sys.executable, "-m", "domainpar.testing", str(folder)]
    code, output = run_command(command, timeout)
    errors = [path.read_text() for path in sorted(folder.glob("error_*.txt"))]
    if errors or code != 0:
        raise RuntimeError("\n".join(errors) or f"{' '.join(command)} ended with exit code {code}:\n{output}")


def run_command(command: list[str], timeout: float, **environment: str) -> tuple[int, str]:
    """Run a program that starts ranks, with a hard time limit on all of them.

    Args:
        command: The program and its arguments.
        timeout: Seconds after which the program and everything it started is killed; longer on a busy machine
            (`patient`). A TimeoutError then holds the output so far.
        **environment: Variables to add.

    Returns:
        Exit code, and standard output and error together.
    """
    defaults = {**own_path(), "OMP_NUM_THREADS": "1", **LET_OPEN_MPI_START}
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
        _result(folder, world.rank).write_bytes(pickle.dumps(function(world, *args)))
    except BaseException:
        (folder / f"error_{world.rank}.txt").write_text(f"rank {world.rank} failed:\n{traceback.format_exc()}")
        world.transport.abort(1)
    world.close()


if __name__ == "__main__":
    _mpi_rank(Path(sys.argv[1]))
