"""What does the first real GPU say? One command for each part, each below ten minutes on a machine with one card.

    python bench/gpu/campaign.py facts             versions, the tests that need a GPU, the doctor
    python bench/gpu/campaign.py flags             every flag of train on the card against a CPU; inference
    python bench/gpu/campaign.py ranks             real NCCL: 1, 2 and 4 ranks that share the card, groups, an own model
    python bench/gpu/campaign.py faults            one rank fails: is it named, after how many seconds?
    python bench/gpu/campaign.py kernels           own kernels under the sanitizers; what the compiler made of them
    python bench/gpu/campaign.py times             a step and an inference of a whole event, beside torch_geometric
    python bench/gpu/campaign.py table             all that is known so far, as tables for RESULTS.md

Everything that ran is a line of `OUT/campaign.jsonl`: a part that is started again goes on with what is missing.
`--again` does all of it anew. Needed: this project with what it imports (`bench/gpu/README.md`), a store of small
events with train and validation, `--small`, and one with whole events, `--real`.

NCCL refuses two ranks on one card of one host. So each rank here claims another host (NCCL_HOSTID): they talk over the
loopback while the card takes turns between them. That is unsupported; a hang there need not be ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *(str(ROOT / it) for it in ("", "tests", "bench"))]))
SIZES = ["--hidden", "32", "--graph-iters", "3", "--max-steps", "3", "--epochs", "2", "--log-every", "1"]
LIMIT = 240.0
BOUND = 2e-3  # of losses after three steps in float32

FLAGS = {
    "as it is": [],
    "dropout, recomputed": ["--dropout", "0.1", "--recompute-every", "2"],
    "offloaded": ["--offload"],
    "bf16": ["--precision", "bf16"],
    "tf32x3": ["--precision", "tf32x3"],
    "float64, clipped": ["--dtype", "float64", "--clip", "0.1"],
    "all readouts": ["--readouts", "all"],
    "means, tanh": ["--aggregate", "mean", "--activation", "tanh"],
    "sectors": ["--mode", "naive", "--sectors", "2"],
    "weights by pT": ["--weighting", "[{weight: 3, conditions: {y: true, pt: [1, .inf]}}]"],
    **{name: ["--model", name] for name in ("agnn", "mpnn", "acorn", "acorn2", "gcn")},
    "a user's own": ["--model", "own_models:evolving", "--dropout", "0.2"],
}
RANKS: dict[str, tuple[int, list[str]]] = {
    "1 rank": (1, []),
    "2 ranks": (2, []),
    "4 ranks": (4, []),
    "4 ranks, 2 to an event": (4, ["--domain-size", "2", "--events-per-step", "2"]),
    "1 rank, 2 events a step": (1, ["--events-per-step", "2"]),
    "1 rank, a user's own": (1, ["--model", "own_models:evolving"]),
    "2 ranks, a user's own": (2, ["--model", "own_models:evolving"]),
}
ALIKE = [("1 rank", "2 ranks"), ("1 rank", "4 ranks"), ("1 rank, 2 events a step", "4 ranks, 2 to an event"),
         ("1 rank, a user's own", "2 ranks, a user's own")]  # fmt: skip
FAULTS = {
    "killed": "at=backward,step=1,do=kill",
    "frozen in an exchange": "at=halo_bwd:1,step=1,do=freeze",
    "an exception": "at=forward,step=1,do=raise",
    "out of memory": "at=forward,step=1,do=oom",
    "not a number": "at=loss,step=1,do=nan",
    "slow for 30 s": "at=reduce,step=1,do=sleep:30",
}
NETWORKS = [(hidden, iters, kind) for hidden, iters in ((64, 4), (128, 8)) for kind in ("full", "tf32x3", "bf16")]
TOOLS = ("memcheck", "racecheck", "initcheck")


class Notes:
    """Lines of `campaign.jsonl`: what was tried, and what came of it."""

    def __init__(self, out: Path, again: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._path, self._again = out / "campaign.jsonl", again
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.known = {(line["part"], line["what"]): line for line in map(json.loads, lines)}

    def once(self, part: str, what: str, run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Do something unless it is known, and note it; an error is noted, too, and tried again next time."""
        before = self.known.get((part, what))
        if before is not None and not self._again and "error" not in before:
            return before
        began = time.time()
        try:
            result = dict(run())
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {str(error)[-1500:]}"}
        line = {"part": part, "what": what, "minutes": round((time.time() - began) / 60, 2), **result}
        self.known[part, what] = line
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{part}: {what}: {line.get('error') or {k: v for k, v in result.items() if k != 'output'}}", flush=True)
        return line


def program(words: Sequence[str], limit: float = LIMIT, **environment: str) -> str:
    """Run a Python program and return what it printed.

    Raises:
        RuntimeError: With the end of its output, if it failed.
    """
    given = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=given, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def on_ranks(words: Sequence[str], ranks: int, limit: float = LIMIT, fault: str = "") -> tuple[list[int], str]:
    """Start ranks that share the one card; their exit codes, and the output of all of them."""
    port = str(20_000 + os.getpid() % 20_000)
    # Inside a batch job these ranks are not the job's own.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI"))}
    environment = outside | {
        "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2", **({"DOMAINPAR_FAULT": fault} if fault else {}),
    }  # fmt: skip
    until = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            file = stack.enter_context(Path(folder, str(rank)).open("w"))
            own = environment | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
            command = [sys.executable, "-m", *words]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=own))
        left = ranks
        # A rank that was frozen on purpose never ends: nobody is there to end it.
        while left > ("do=freeze" in fault) and time.monotonic() < until:
            time.sleep(0.1)
            left = sum(process.poll() is None for process in processes)
        codes = [-9 if process.poll() is None else int(process.returncode) for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        return codes, "\n".join(Path(folder, str(rank)).read_text() for rank in range(ranks))


def losses(directory: Path) -> list[float]:
    """The losses of a run, step by step and of its validations."""
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def distance(directory: Path, other: Path) -> float:
    """The largest relative difference of the losses of two runs."""
    return float(np.abs(np.array(losses(directory)) / np.array(losses(other)) - 1).max())


def facts(notes: Notes, options: argparse.Namespace) -> None:
    """Versions and the card; every test that needs one; the doctor."""
    import torch

    def versions() -> dict[str, Any]:
        card = torch.cuda.get_device_properties(0)
        nccl = torch.cuda.nccl.version() if torch.version.cuda else None
        built = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}
        return {**built, "card": card.name, "memory": f"{card.total_memory / 2**30:.0f} GiB"}

    def tests() -> dict[str, Any]:
        files = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "@needs_gpu" in path.read_text()]
        # Without the project's own flags, which leave out the last line.
        output = program(["-m", "pytest", "-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider", *files], limit=500)
        passed, skipped = (re.search(rf"(\d+) {word}", output) for word in ("passed", "skipped"))
        return {"passed": int(passed[1]) if passed else 0, "skipped": int(skipped[1]) if skipped else 0}

    notes.once("facts", "versions", versions)
    notes.once("facts", "tests", tests)
    notes.once("facts", "doctor", lambda: {"output": program(["-m", "domainpar.doctor", "--device", "cuda"])[-4000:]})


def flags(notes: Notes, options: argparse.Namespace) -> None:
    """Losses of a few steps on the card and on a CPU; scores and tracks."""
    for what, words in FLAGS.items():
        out = options.out / "flags" / re.sub(r"\W+", "-", what)

        def both(words: Sequence[str] = words, out: Path = out) -> dict[str, Any]:
            for device in ("cpu", "cuda"):
                own = [word for word in words if word != "--offload" or device == "cuda"]
                train = ["-m", "domainpar.train", "--store", str(options.small), "--overwrite", "--device", device]
                program([*train, "--out", str(out / device), *SIZES, *own])
            apart = distance(out / "cuda", out / "cpu")
            if not apart <= (0.02 if "bf16" in words else BOUND):
                raise RuntimeError(f"losses differ by {apart:.1e}")
            return {"losses differ by": apart}

        notes.once("flags", what, both)

    def inference() -> dict[str, Any]:
        import zarr

        run, logits, last = options.out / "flags" / "as-it-is" / "cuda", [], {}
        for device in ("cpu", "cuda"):
            words = ["--run", str(run), "--split", "val", "--device", device, "--tracks", "walk", "--overwrite"]
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
            began = time.monotonic()
            codes, output = on_ranks([*train, "--device", "cuda", *SIZES, *how, *words], number)
            seconds = time.monotonic() - began
            if any(codes):
                raise RuntimeError(f"exit codes {codes}: {output[-2500:]}")
            found = re.search(r"sha256 (\w+)", output)
            return {"sha256": found[1] if found else None, "seconds": round(seconds, 1), "losses": losses(out)}

        notes.once("ranks", what, run)
    for one, several in ALIKE:
        pair = [notes.known.get(("ranks", name), {}) for name in (one, several)]

        def alike(pair: Sequence[Mapping[str, Any]] = pair, own: bool = "own" in one) -> dict[str, Any]:
            apart = float(np.abs(np.array(pair[0]["losses"]) / np.array(pair[1]["losses"]) - 1).max())
            if not own and pair[0]["sha256"] != pair[1]["sha256"]:
                raise RuntimeError(f"other parameters, losses differ by {apart:.1e}: own kernels give one hash")
            return {"losses differ by": apart}

        if all("losses" in line for line in pair):
            notes.once("ranks", f"{several} against {one}", alike)


def faults(notes: Notes, options: argparse.Namespace) -> None:
    """One of two ranks fails: the error that is printed, and the seconds from the fault to the end of the others."""
    for what, fault in FAULTS.items():

        def fail(fault: str = fault) -> dict[str, Any]:
            train = ["domainpar.train", "--store", str(options.small), "--overwrite", "--device", "cuda"]
            train += ["--out", str(options.out / "fault"), "--transport", "nccl", "--share-gpu"]
            how = ["--timeout", "10", "--first-timeout", "60"]
            codes, output = on_ranks([*train, *SIZES, *how], 2, 120, f"rank=1,{fault}")
            happened = re.findall(r"fault on purpose: .*, time ([\d.]+)", output)
            errors = [line for line in output.splitlines() if line.startswith("domainpar: error: ")]
            if len(errors) != 1 or not happened:
                raise RuntimeError(f"{len(errors)} errors, exit codes {codes}: {output[-2500:]}")
            seconds = round(time.time() - float(happened[-1]), 1)
            return {"error shown": errors[0], "exit codes": codes, "seconds": seconds}

        notes.once("faults", what, fail)


def kernels(notes: Notes, options: argparse.Namespace) -> None:
    """A step under NVIDIA's sanitizers, where they are (races are seen in shared memory only); registers and spills."""
    step = [str(ROOT / "bench/gpu/one_card.py"), str(options.small), "domainpar", "64", "2", "full", "--repeats", "1"]
    sanitizer = shutil.which("compute-sanitizer")
    given = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    for tool in TOOLS if sanitizer else ():

        def clean(tool: str = tool) -> dict[str, Any]:
            command = [str(sanitizer), "--tool", tool, "--error-exitcode", "9", sys.executable, *step]
            done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=500)
            if done.returncode:
                raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-2500:]}")
            return {"says": done.stdout.splitlines()[-1]}

        notes.once("kernels", tool, clean)
    if not sanitizer:
        print("kernels: compute-sanitizer is not on the path, so nothing ran under it")
    for precision in ("full", "tf32x3", "bf16"):
        words = [str(ROOT / "bench/gpu/compiled.py"), "--arch", "80", "90", "--precision", precision]
        notes.once("kernels", f"compiled, {precision}", lambda words=words: {"output": program(words, limit=500)})


def times(notes: Notes, options: argparse.Namespace) -> None:
    """Milliseconds of a step and of an inference, launches, the share of it that the card is busy, memory."""
    for hidden, iters, precision in NETWORKS:
        for system in ("domainpar", "torch", "eager", "checkpointed", "compiled"):
            if system not in ("domainpar", "torch") and (precision != "full" or not options.peers):
                continue
            words = [str(ROOT / "bench/gpu/one_card.py"), str(options.real), system, str(hidden), str(iters), precision]
            what = f"{system} {hidden} x {iters} {precision}"
            words += ["--repeats", str(options.repeats)]
            notes.once("times", what, lambda words=words: json.loads(program(words, limit=500).splitlines()[-1]))


def table(notes: Notes, options: argparse.Namespace) -> None:
    """Everything that is known, as Markdown."""
    for part in ("facts", "flags", "ranks", "faults", "kernels", "times"):
        lines = [line for (of_part, _), line in notes.known.items() if of_part == part]
        names = [name for name in dict.fromkeys(name for line in lines for name in line) if name not in HIDDEN]
        print(f"\n## {part}\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
        for line in lines:
            print(f"| {' | '.join(str(line.get(name, '')).replace('|', '/')[:200] for name in names)} |")


HIDDEN = ("part", "output", "losses", "minutes")
PARTS: dict[str, Callable[[Notes, argparse.Namespace], None]] = {
    "facts": facts, "flags": flags, "ranks": ranks, "faults": faults, "kernels": kernels, "times": times,
    "table": table,
}  # fmt: skip


def failed(notes: Notes, part: str) -> Iterator[str]:
    """What went wrong in a part."""
    return (what for (of_part, what), line in notes.known.items() if of_part == part and "error" in line)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--small", type=Path, default=Path("campaign/store_small"))
    parser.add_argument("--real", type=Path, default=Path("campaign/store_real"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "campaign/out")))
    parser.add_argument("--again", action="store_true", help="do what is known already anew")
    parser.add_argument("--repeats", type=int, default=20, help="steps that are timed")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave out plain torch_geometric")
    options = parser.parse_args(argv)
    for name in ("small", "real", "out"):
        setattr(options, name, getattr(options, name).resolve())
    notes = Notes(options.out, options.again)
    PARTS[options.part](notes, options)
    wrong = list(failed(notes, options.part))
    print(f"{options.part}: {'all is well' if not wrong else 'not well: ' + ', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
