"""Pretended GPUs in this process: `torch.cuda` reports some, device "cuda" computes on the CPU, checked and counted.

`environment()` makes every Python process that inherits it find them, with NCCL mocked if asked for: see
`sitecustomize.py`. Here are the library, built when first asked for, and the face of `torch.cuda`.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
GPUS, NCCL, LOG = "PRETENDED_GPUS", "PRETENDED_NCCL", "PRETENDED_LOG"
MEMORY = 80 * 2**30
TORCH = "2.13."  # the shim uses what torch does not promise to keep


class Missing(Exception):
    """The library cannot be built here; says why."""


def library() -> Path:
    """The shared library for the torch of this Python, built if it is not there yet: ten seconds.

    Raises:
        Missing: If there is no compiler, or another torch than the one it is written for.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Missing("no torch")
    torch = Path(spec.origin).parent
    facts: dict[str, Any] = {}
    exec((torch / "version.py").read_text(), facts)  # not imported: torch itself must find the library
    version = str(facts["__version__"])
    if not version.startswith(TORCH) or facts.get("cuda") is not None:
        raise Missing(f"torch is {version}; the pretended GPU is written for a torch {TORCH}x that is built for CPUs")
    compiler = shutil.which("g++")
    if compiler is None:
        raise Missing("no g++")
    source = HERE / "card.cpp"
    digest = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:12]
    built = HERE / "built" / f"card-{digest}.so"
    built.parent.mkdir(exist_ok=True)
    with (built.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run in several processes
        if not built.exists():
            new = built.with_suffix(".new")
            includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
            links = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
            command = [
                compiler,
                "-O1",
                "-std=c++20",
                "-shared",
                "-fPIC",
                *includes,
                str(source),
                "-o",
                str(new),
                *links,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the pretended GPU cannot be built:\n{done.stderr[-3000:]}")
            new.rename(built)
    return built


def environment(gpus: int = 1, nccl: bool = False, log: Path | None = None) -> dict[str, str]:
    """Variables with which Python processes find pretended GPUs.

    Args:
        gpus: How many each process sees.
        nccl: Whether NCCL is mocked, too.
        log: Each process writes the calls of the mocked NCCL to a file of this folder when it ends.
    """
    library()  # built by one process, before many want it
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, GPUS: str(gpus), NCCL: "1" if nccl else "", LOG: "" if log is None else str(log)}


_library: Any = None


def before_torch() -> None:
    """Load the library, before torch looks for its devices."""
    global _library
    if _library is not None:
        return
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    lib = Path(spec.origin).parent / "lib"
    for pattern in ("libgomp*.so*", "libc10.so", "libtorch_cpu.so"):
        for path in [*lib.glob(pattern), *(lib.parents[1] / "torch.libs").glob(pattern)]:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)
    _library.pretended_counts.restype = ctypes.c_char_p
    _library.pretended_live.restype = _library.pretended_peak.restype = ctypes.c_long


def counts() -> dict[str, dict[str, int]]:
    """Launches, waits of the host and bytes touched since `reset`, by operator."""
    found: dict[str, dict[str, int]] = json.loads(_library.pretended_counts().decode())
    return found


def reset() -> None:
    """Begin to count anew."""
    _library.pretended_reset()


class Event:
    """An event of a stream on which everything is done at once."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._when: float | None = None

    def record(self, stream: Any = None) -> None:
        self._when = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _library.pretended_wait(b"event")

    def elapsed_time(self, later: "Event") -> float:
        assert self._when is not None
        assert later._when is not None
        return 1e3 * (later._when - self._when)


def after_torch() -> None:
    """Give `torch.cuda` the face of what is pretended."""
    import torch

    _library.pretended_begin()
    number = int(os.environ[GPUS])

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(_library.pretended_device())
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(_library.pretended_device()) if index is None else index

    def set_device(device: Any) -> None:
        assert isinstance(device, int) or torch.device(device).index is not None, f"pretended GPU: which of {device}?"
        assert 0 <= index_of(device) < number, f"pretended GPU: there is no {device}, only {number}"
        _library.pretended_set_device(index_of(device))

    def exchange_device(index: int) -> int:
        before = index_of()
        if index >= 0:
            set_device(index)
        return before

    def properties(device: Any = None) -> SimpleNamespace:
        # One visible GPU of several has another uuid in each process.
        uuid = f"pretended-{os.environ.get('PRETENDED_FIRST', '0')}-{index_of(device)}"
        return SimpleNamespace(
            name="pretended GPU", total_memory=MEMORY, uuid=uuid, major=9, minor=0, multi_processor_count=132
        )

    class Stream:
        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *_: Any) -> None:
            return None

        def synchronize(self) -> None:
            _library.pretended_wait(b"stream")

        def wait_stream(self, _: Any) -> None:
            return None

        def wait_event(self, _: Any) -> None:
            return None

    stream = Stream()
    face = {
        "_lazy_init": lambda: None,
        "is_available": lambda: number > 0,
        "is_initialized": lambda: True,
        "device_count": lambda: number,
        "set_device": set_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "current_device": index_of,
        "synchronize": lambda device=None: _library.pretended_wait(b"synchronize"),
        "memory_allocated": lambda device=None: _library.pretended_live(),
        "max_memory_allocated": lambda device=None: _library.pretended_peak(),
        "memory_reserved": lambda device=None: _library.pretended_live(),
        "reset_peak_memory_stats": lambda device=None: _library.pretended_reset(),
        "memory_stats": lambda device=None: {
            "requested_bytes.all.current": _library.pretended_live(),
            "requested_bytes.all.peak": _library.pretended_peak(),
        },
        "mem_get_info": lambda device=None: (MEMORY - _library.pretended_live(), MEMORY),
        "get_device_name": lambda device=None: "pretended GPU",
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "current_stream": lambda device=None: stream,
        "stream": lambda chosen: stream,
        "Stream": lambda *_, **__: stream,
        "Event": Event,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "empty_cache": lambda: None,
    }
    for name, what in face.items():
        setattr(torch.cuda, name, what)
    # Storages of "cuda" have no class in Python in a torch built for CPUs.
    for kind in (torch.Tensor, torch.nn.Parameter):
        kind.__deepcopy__ = _copied(kind.__deepcopy__)  # type: ignore[method-assign]


def _copied(plain: Any) -> Any:
    def deepcopy(self: Any, memo: Any) -> Any:
        import torch

        if id(self) in memo:
            return memo[id(self)]
        if not self.is_cuda:
            return plain(self, memo)
        made = self.detach().clone()
        is_parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = (
            torch.nn.Parameter(made, self.requires_grad) if is_parameter else made.requires_grad_(self.requires_grad)
        )
        return memo[id(self)]

    return deepcopy
