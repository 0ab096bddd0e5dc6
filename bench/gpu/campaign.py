"""What does the first real GPU say? Some minutes for each part, on a machine with one card; several parts in one call.

    python bench/gpu/campaign.py prepare           the two stores of simulated events that the others take
    python bench/gpu/campaign.py facts             versions, what the card reaches, the doctor
    python bench/gpu/campaign.py tests             every test that needs a GPU
    python bench/gpu/campaign.py times             a step and an inference of a whole event, beside torch_geometric
    python bench/gpu/campaign.py ranks             real NCCL: 1, 2 and 4 ranks that share the card, groups, an own model
    python bench/gpu/campaign.py faults            one rank fails: is it named, after how many seconds?
    python bench/gpu/campaign.py flags             every flag of train on the card against a CPU; inference
    python bench/gpu/campaign.py table             all that is known so far, as tables for RESULTS.md

Everything that ran is a line of `--notes`: a part that is started again goes on with what is missing. `--known` reads
those of another machine, too; `--again` does all of it anew, `--only` what a pattern finds. Needed: this project with
what it imports (`bench/gpu/README.md`).

NCCL refuses two ranks on one card of one host. So each rank here claims another host (NCCL_HOSTID): they talk over the
loopback while the card takes turns between them. That is unsupported; a hang there need not be ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *(str(ROOT / it) for it in ("", "tests", "bench"))]))
SIZES = ["--hidden", "32", "--graph-iters", "3", "--max-steps", "3", "--epochs", "2", "--log-every", "1"]
LIMIT = 240.0
BOUND, BOUND_OF_BF16 = 2e-3, 2e-2  # of losses after three steps

FLAGS = {
    "as it is": [],
    "recomputed": ["--recompute-every", "2"],
    "offloaded": ["--model", "examples.offload:acorn2"],
    "bf16": ["--precision", "bf16"],
    "float64, clipped": ["--dtype", "float64", "--clip", "0.1"],
    "all readouts": ["--readouts", "all"],
    "means, tanh": ["--aggregate", "mean", "--activation", "tanh"],
    "sectors": ["--mode", "naive", "--sectors", "2"],
    "weights by pT": ["--weighting", "[{weight: 3, conditions: {y: true, pt: [1, .inf]}}]"],
    **{name: ["--model", name] for name in ("acorn", "acorn2")},
    "attention": ["--model", "examples.networks:AttentionNetwork"],
    "a user's own": ["--model", "own_models:evolving", "--dropout", "0.2"],
}
RANKS: dict[str, tuple[int, list[str]]] = {
    "1 rank": (1, []),
    "2 ranks": (2, []),
    "4 ranks": (4, []),
    **{
        f"{number}, {kind}": (int(number[0]), words)
        for kind, words in (
            ("bf16", ["--precision", "bf16"]),
            ("dropout", ["--dropout", "0.1"]),
        )
        for number in ("1 rank", "2 ranks")
    },
    "4 ranks, 2 to an event": (4, ["--domain-size", "2", "--events-per-step", "2"]),
    "1 rank, 2 events a step": (1, ["--events-per-step", "2"]),
    "1 rank, a user's own": (1, ["--model", "own_models:evolving"]),
    "2 ranks, a user's own": (2, ["--model", "own_models:evolving"]),
}
ALIKE = [
    ("1 rank", "2 ranks"),
    ("1 rank", "4 ranks"),
    ("1 rank, 2 events a step", "4 ranks, 2 to an event"),
    *((f"1 rank, {kind}", f"2 ranks, {kind}") for kind in ("bf16", "dropout", "a user's own")),
]
FAULTS = {
    "killed": "at=backward,step=1,do=kill",
    "frozen in an exchange": "at=halo_bwd:1,step=1,do=freeze",
    "an exception": "at=forward,step=1,do=raise",
    "out of memory": "at=forward,step=1,do=oom",
    "not a number": "at=loss,step=1,do=nan",
    "slow for 30 s": "at=reduce,step=1,do=sleep:30",
}
SYSTEMS = {
    "domainpar": ("full", "bf16"), "eager": ("full", "tf32", "bf16"), "checkpointed": ("full", "tf32", "bf16"),
    "compiled": ("full",),
}  # fmt: skip
SHAPES = ((128, 8), (64, 4))
ONE_CARD = str(ROOT / "bench/gpu/one_card.py")
ON_PURPOSE = ROOT / "tests/faults/on_purpose.py"


class Notes:
    """Lines of a file: what was tried, and what came of it.

    Args:
        path: The file; lines are added.
        again: Do again what is known.
        known: Another such file, which is only read.
        only: A pattern; what it is not found in is left out.
    """

    def __init__(self, path: Path, again: bool = False, known: Path | None = None, only: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._again, self._only, self._lock = path, again, only, threading.Lock()
        lines = [line for file in (known, path) if file and file.exists() for line in file.read_text().splitlines()]
        self.known = {(line["part"], line["what"]): line for line in map(json.loads, lines)}

    def once(self, part: str, what: str, run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Do something unless it is known, and note it; an error is noted, too, and tried again next time."""
        before = self.known.get((part, what))
        if before is not None and not self._again and "error" not in before:
            return before
        if not re.search(self._only, what):
            return {}
        began = time.time()
        try:
            result = dict(run())
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {str(error)[-3000:]}"}
        line = {"part": part, "what": what, "minutes": round((time.time() - began) / 60, 2), **result}
        with self._lock, self._path.open("a") as file:
            self.known[part, what] = line
            file.write(json.dumps(line) + "\n")
        print(f"{part}: {what}: {line.get('error') or {k: v for k, v in result.items() if k != 'output'}}", flush=True)
        return line


def program(words: Sequence[str], limit: float = LIMIT, before: Sequence[str] = (), **environment: str) -> str:
    """Run a Python program and return what it printed; it ends after `limit` seconds, and what it started with it.

    Raises:
        RuntimeError: With the end of its output, if it failed or was cut off.
    """
    given = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"} | environment
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [*before, sys.executable, *words]
        process = subprocess.Popen(command, cwd=ROOT, env=given, stdout=out, stderr=err, start_new_session=True)
        try:
            ended = f"exit code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"cut off after {limit:g} s"
        texts = [(file.seek(0), file.read())[1] for file in (err, out)]
    if process.returncode:
        raise RuntimeError(f"{ended}: {'...'.join(text[-1500:] for text in texts)}")
    return texts[1]


def on_ranks(
    words: Sequence[str], ranks: int, limit: float = LIMIT, fault: str = "", **environment: str
) -> tuple[list[int], str, float]:
    """Start ranks that share the one card; their exit codes, the output of all of them, and when rank 0 ended."""
    port = str(20_000 + os.getpid() % 20_000)
    # Inside a batch job these ranks are not the job's own.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI"))}
    environment = outside | environment | {
        "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2", "NCCL_DEBUG": "WARN", **({"DOMAINPAR_FAULT": f"{ON_PURPOSE} {fault}"} if fault else {}),
    }  # fmt: skip
    until = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            file = stack.enter_context(Path(folder, str(rank)).open("w"))
            own = environment | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
            command = [sys.executable, "-m", *words]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=own))
        left, ended = ranks, 0.0
        # A rank that was frozen on purpose never ends: nobody is there to end it.
        while left > ("do=freeze" in fault) and time.monotonic() < until:
            time.sleep(0.1)
            left = sum(process.poll() is None for process in processes)
            ended = ended or (time.time() if processes[0].poll() is not None else 0.0)
        codes = [-9 if process.poll() is None else int(process.returncode) for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        return codes, "\n".join(Path(folder, str(rank)).read_text() for rank in range(ranks)), ended


def losses(directory: Path) -> list[float]:
    """The losses of a run, step by step and of its validations."""
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def distance(directory: Path, other: Path) -> float:
    """The largest relative difference of the losses of two runs."""
    return float(np.abs(np.array(losses(directory)) / np.array(losses(other)) - 1).max())


def prepare(notes: Notes, options: argparse.Namespace) -> None:
    """Small events to train and validate on, and a whole one."""
    wanted = ((options.small, "8", "5000", "0.25"), (options.real, "1", "107800", "0"))

    def make(store: Path, events: str, hits: str, val: str) -> None:
        sizes = ["--events", events, "--hits", hits, "--val-split", val, "--test-split", "0"]
        words = ["-m", "domainpar.prepare", "--source", "simulate", *sizes, "--store", str(store)]
        notes.once("prepare", store.name, lambda: {"output": program(words, 200)})

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda it: None if (it[0] / "manifest.json").exists() else make(*it), wanted))


def facts(notes: Notes, options: argparse.Namespace) -> None:
    """Versions and the card, what it reaches, the doctor."""
    import torch

    def versions() -> dict[str, Any]:
        card = torch.cuda.get_device_properties(0)
        nccl = torch.cuda.nccl.version() if torch.version.cuda else None
        built = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}
        others = {name: str(getattr(__import__(name), "__version__", "")) for name in ("numpy", "numba", "zarr")}
        return {**built, **others, "card": card.name, "memory": f"{card.total_memory / 2**30:.0f} GiB"}

    def machine() -> dict[str, Any]:
        asked = (["nvidia-smi"], ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv"],
                 ["ip", "-br", "link"])  # fmt: skip
        there = [words for words in asked if shutil.which(words[0])]
        said = [subprocess.run(words, capture_output=True, text=True, timeout=30).stdout for words in there]
        return {"output": "\n".join(said)}

    notes.once("facts", "versions", versions)
    notes.once("facts", "machine", machine)
    notes.once("facts", "ceilings", lambda: json.loads(program([ONE_CARD, "--ceilings"]).splitlines()[-1]))
    # It tells of MPI and of much else; what of it is wrong is for a reader.
    doctor = "from domainpar.doctor import main; main(['--device', 'cuda'])"
    notes.once("facts", "doctor", lambda: {"output": program(["-c", doctor])[-6000:]})


def tests(notes: Notes, options: argparse.Namespace) -> None:
    """Every test that needs a GPU."""

    def run() -> dict[str, Any]:
        # Without the project's own flags, which leave out the last line; those on pretended cards name others.
        files = [path for path in (ROOT / "tests").rglob("test_*.py") if "@needs_gpu" in path.read_text()]
        words = ["-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider", "-rfE", "--tb=short", "--durations=8"]
        words += ["-n", str(options.jobs)] if find_spec("xdist") else []
        chosen = [str(path) for path in files if "pretended_gpu" not in path.parts]
        output = program(["-m", "pytest", *words, *chosen], 500)
        passed, skipped = (re.search(rf"(\d+) {word}", output) for word in ("passed", "skipped"))
        counts = {"passed": int(passed[1]) if passed else 0, "skipped": int(skipped[1]) if skipped else 0}
        return {**counts, "output": output[-2000:]}

    notes.once("tests", "that need a GPU", run)


def flags(notes: Notes, options: argparse.Namespace) -> None:
    """Losses of a few steps on the card and on a CPU; scores and tracks."""

    def both(what: str) -> dict[str, Any]:
        words, out = FLAGS[what], options.out / "flags" / re.sub(r"\W+", "-", what)
        for device in ("cpu", "cuda"):
            train = ["-m", "domainpar.train", "--store", str(options.small), "--overwrite", "--device", device]
            program([*train, "--out", str(out / device), *SIZES, *words])
        apart = distance(out / "cuda", out / "cpu")
        if not apart <= (BOUND_OF_BF16 if "bf16" in words else BOUND):
            raise RuntimeError(f"losses differ by {apart:.1e}")
        return {"losses differ by": apart}

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda what: notes.once("flags", what, lambda: both(what)), FLAGS))

    def inference() -> dict[str, Any]:
        import zarr

        run, logits, last = options.out / "flags" / "as-it-is" / "cuda", [], {}
        for device in ("cpu", "cuda"):
            words = ["--run", str(run), "--split", "val", "--device", device, "--tracks", "greedy", "--overwrite"]
            out = options.out / "scores" / device
            last[device] = program(["-m", "domainpar.infer", *words, "--out", str(out)])[-400:]
            with zarr.storage.ZipStore(next(out.glob("*.zarr.zip")), mode="r") as file:
                logits.append(zarr.open(file, mode="r")["edge_logit"][:])
        return {"logits differ by": float(np.abs(logits[0] - logits[1]).max()), "output": last}

    notes.once("flags", "inference", inference)


def ranks(notes: Notes, options: argparse.Namespace) -> None:
    """Real NCCL: the losses of one rank on any number of them."""
    for what, (number, words) in RANKS.items():
        out = options.out / "ranks" / re.sub(r"\W+", "-", what)

        def run(number: int = number, words: Sequence[str] = words, out: Path = out) -> dict[str, Any]:
            train = ["domainpar.train", "--store", str(options.small), "--out", str(out), "--overwrite"]
            how = ["--transport", "nccl", "--share-gpu", "--check-replicas-every", "1"] if number > 1 else []
            began, tried, codes, output = time.monotonic(), "", [1], ""
            for other in ({}, OTHER_MEMORY):
                if any(codes):
                    tried = " ".join(other)
                    codes, output, _ = on_ranks([*train, "--device", "cuda", *SIZES, *how, *words], number, 90, **other)
            seconds = time.monotonic() - began
            if any(codes):
                raise RuntimeError(f"exit codes {codes}: {output[-2500:]}")
            return {"seconds": round(seconds, 1), "with": tried, "losses": losses(out)}

        if "error" in notes.once("ranks", what, run) and what == "2 ranks":
            print("ranks: two of them cannot share the card here, so no more are tried")
            return
    for one, several in ALIKE:
        pair = [notes.known.get(("ranks", name), {}) for name in (one, several)]

        def alike(pair: Sequence[Mapping[str, Any]] = pair, in_bf16: bool = "bf16" in one) -> dict[str, Any]:
            apart = float(np.abs(np.array(pair[0]["losses"]) / np.array(pair[1]["losses"]) - 1).max())
            if not apart <= (BOUND_OF_BF16 if in_bf16 else BOUND):
                raise RuntimeError(f"losses differ by {apart:.1e}")
            return {"losses differ by": apart}

        if all("losses" in line for line in pair):
            notes.once("ranks", f"{several} against {one}", alike)


def faults(notes: Notes, options: argparse.Namespace) -> None:
    """One of two ranks fails: the error that is printed, and the seconds from the fault to the end of the others."""
    for what, fault in FAULTS.items():

        def fail(fault: str = fault) -> dict[str, Any]:
            train = ["domainpar.train", "--store", str(options.small), "--overwrite", "--device", "cuda"]
            train += ["--out", str(options.out / "fault"), "--transport", "nccl", "--share-gpu"]
            how = ["--timeout", "10"]
            other = OTHER_MEMORY if notes.known.get(("ranks", "2 ranks"), {}).get("with") else {}
            codes, output, ended = on_ranks([*train, *SIZES, *how], 2, 120, f"rank=1,{fault}", **other)
            happened = re.findall(r"fault on purpose: .*, time ([\d.]+)", output)
            errors = [line for line in output.splitlines() if line.startswith("domainpar: error: ")]
            if len(errors) != 1 or not happened:
                raise RuntimeError(f"{len(errors)} errors, exit codes {codes}: {output[-2500:]}")
            if not ended:
                raise RuntimeError(f"rank 0 did not end within 120 s: {output[-2500:]}")
            return {"error shown": errors[0], "exit codes": codes, "seconds": round(ended - float(happened[-1]), 1)}

        notes.once("faults", what, fail)


def times(notes: Notes, options: argparse.Namespace) -> None:
    """Milliseconds of a step and of an inference, launches, the share of it that the card is busy, memory."""
    wanted = [(*shape, system, kind) for shape in SHAPES for system in SYSTEMS for kind in SYSTEMS[system]]
    wanted.sort(key=lambda it: it[2] == "compiled")  # minutes of a compiler: last of all

    def words(hidden: int, iters: int, system: str, kind: str) -> list[str]:
        return [ONE_CARD, str(options.real), system, str(hidden), str(iters), kind]

    for one in wanted:
        if one[2] == "domainpar" or options.peers:
            timed = [*words(*one), "--repeats", str(options.repeats)]
            what = f"{one[2]} {one[0]} x {one[1]} {one[3]}"
            notes.once("times", what, lambda timed=timed: json.loads(program(timed, 300).splitlines()[-1]))


def table(notes: Notes, options: argparse.Namespace) -> None:
    """Everything that is known, as Markdown."""
    for part in dict.fromkeys(of_part for of_part, _ in notes.known):
        lines = [line for (of_part, _), line in notes.known.items() if of_part == part]
        names = [name for name in dict.fromkeys(name for line in lines for name in line) if name not in HIDDEN]
        print(f"\n## {part}\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
        for line in lines:
            print(f"| {' | '.join(str(line.get(name, '')).replace('|', '/')[:200] for name in names)} |")


OTHER_MEMORY = {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}
"""For a second try: in virtual machines NCCL's usual allocation may fail."""

HIDDEN = ("part", "output", "losses", "minutes")
PARTS: dict[str, Callable[[Notes, argparse.Namespace], None]] = {
    "prepare": prepare, "facts": facts, "tests": tests, "times": times, "ranks": ranks, "faults": faults,
    "flags": flags, "table": table,
}  # fmt: skip


def failed(notes: Notes, part: str) -> Iterator[str]:
    """What went wrong in a part."""
    return (what for (of_part, what), line in notes.known.items() if of_part == part and "error" in line)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--small", type=Path, default=Path("stores/campaign_small"))
    parser.add_argument("--real", type=Path, default=Path("stores/campaign_real"))
    parser.add_argument("--out", type=Path, default=Path("runs/campaign"), help="what runs write, and nobody keeps")
    parser.add_argument("--notes", type=Path, help="default: campaign.jsonl in $OUT, else in --out")
    parser.add_argument("--known", type=Path, help="notes of before")
    parser.add_argument("--only", default="", help="a pattern that the name of what is done must hold")
    parser.add_argument("--again", action="store_true", help="do what is known already anew")
    parser.add_argument("--repeats", type=int, default=20, help="steps that are timed")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="programs at a time")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave out plain torch_geometric")
    options = parser.parse_args(argv)
    for name in ("small", "real", "out"):
        setattr(options, name, getattr(options, name).resolve())
    path = options.notes or Path(os.environ.get("OUT", options.out), "campaign.jsonl")
    notes = Notes(path, options.again, options.known, options.only)
    for part in options.parts:
        PARTS[part](notes, options)
    if "table" not in options.parts:
        table(notes, options)
    wrong = [f"{part}: {what}" for part in options.parts for what in failed(notes, part)]
    print(f"{', '.join(options.parts)}: {'all is well' if not wrong else 'not well: ' + ', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
