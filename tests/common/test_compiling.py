"""Compiling: kept until what a kernel reaches changes, done once for all processes, said once, no time of the work."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import torch
from numba import njit
from numba.core import event
from numba.core.dispatcher import Dispatcher

import domainpar
import partitioners
from domainpar.common import compiling, words
from domainpar.nn import operations
from domainpar.testing import patient

KERNEL = "from domainpar.common.compiling import compiled\n\n\n@compiled\ndef add(a, b):\n    return a + b\n"

RANK = """
import sys
import time
from domainpar.common import compiling
from slow_kernel import add

lock = compiling.fcntl.flock
def slow(*how):
    lock(*how)
    time.sleep(0.5)  # so that the other process comes meanwhile
compiling.fcntl.flock, compiling.timeouts.COMPILING_SILENCE = slow, 0.1
compiling.watch_compiling(talks=True)
assert add(1, 2) == 3
print(sum(add.stats.cache_misses.values()), sum(add.stats.cache_hits.values()))
"""


def test_of_processes_that_want_a_kernel_at_once_one_compiles_it_and_all_say_so(tmp_path, monkeypatch):
    (tmp_path / "slow_kernel.py").write_text(KERNEL)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    texts = [rank.communicate(timeout=patient(100)) for rank in ranks]
    assert sorted(out.split() for out, _ in texts) == [["0", "1"], ["1", "0"]], texts
    assert [err.count("compiling: kernels for this machine") for _, err in texts] == [1, 1]


@pytest.fixture
def watched(capsys):
    compiling.watch_compiling(talks=True)
    yield capsys
    compiling.watch_compiling(talks=False)


def test_the_clock_stands_still_while_a_kernel_is_compiled_and_goes_on_after_it(watched, monkeypatch):
    now = [7.0]

    class Slow(event.Listener):
        """Compiling takes 100 s of a clock of our own."""

        def on_start(self, started):
            now[0] += 100

        def on_end(self, ended):
            now[0] += 100

    @njit
    def outer(count):
        return inner(count) + 1

    @njit
    def inner(count):
        return count * 2

    monkeypatch.setattr(compiling, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(compiling._WATCH, "_last_text", "")
    before = compiling.clock()
    with event.install_listener("numba:compile", Slow()):
        assert outer(3) == 7
    assert now[0] >= 407, "of two kernels"
    assert compiling.clock() == before
    assert watched.readouterr().err.count("compiling: ") == 1
    now[0] += 5
    assert compiling.clock() - before == 5


def test_while_kernels_are_compiled_it_is_told_how_many_are_there(watched, monkeypatch):
    def compile_one():
        njit(lambda x: x + 1)(1)

    told = []
    monkeypatch.setattr(words.PROGRESS_LOG, "_works", [])
    monkeypatch.setattr(compiling._WATCH, "ready", 0)
    real = words.PROGRESS_LOG.begin
    monkeypatch.setattr(words.PROGRESS_LOG, "begin", lambda work: (real(work), told.append(work())))
    for _ in range(3):
        compile_one()
    assert told == [f"compiling: {count} compiled or loaded so far" for count in ("0 kernels", "1 kernel", "2 kernels")]
    assert words.PROGRESS_LOG._works == [], "and what is compiled is no longer at hand"


def test_a_lock_that_nobody_gives_back_or_that_cannot_be_had_stops_nothing(monkeypatch, tmp_path):
    (tmp_path / "slow_kernel.py").write_text(KERNEL)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    program = (
        "from pathlib import Path\nfrom domainpar.common import compiling\nfrom slow_kernel import add\n"
        "compiling.timeouts.COMPILING, compiling._lock_file = 1.0, lambda: Path({file!r})\n"
        "compiling.watch_compiling(talks=True)\n"
        "assert (add(1, 2), add(1.0, 2.0)) == (3, 3.0)\nassert compiling._WATCH._alone == {alone}\n"
    )
    with (tmp_path / "held").open("w") as held:
        compiling.fcntl.flock(held, compiling.fcntl.LOCK_EX)
        for file, alone in (("held", True), ("no such directory/held", False)):
            text = program.format(file=str(tmp_path / file), alone=alone)
            ended = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, timeout=patient(60))
            assert ended.returncode == 0, ended.stderr.decode()
            shutil.rmtree(tmp_path / "kept")


def test_kernels_that_are_kept_are_loaded_without_the_lock(tmp_path, monkeypatch):
    """Ranks load some sixty kernels at every start: one after the other, many ranks would wait for long."""
    (tmp_path / "slow_kernel.py").write_text(KERNEL)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    imported = "from domainpar.common import compiling\n"
    program = imported + "compiling.watch_compiling(True)\nfrom slow_kernel import add\nadd(1, 2)"
    text = imported + "compiling.fcntl.flock = None\n" + program
    for code in (program, text):
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=patient(60))


@pytest.fixture
def two_processes(tmp_path):
    """The files of one kernel as two processes see them."""
    return [compiling._KernelFiles(str(tmp_path), "kernel", "stamp") for _ in range(2)]


def test_kernels_that_two_processes_keep_at_once_do_not_stand_for_each_other(two_processes, monkeypatch):
    one, other = two_processes
    write_list = one._save_index

    def meanwhile(kept):
        """The other process, which has read the list before this one writes it, is done before this one goes on."""
        write_its_list = other._save_index
        with monkeypatch.context() as changed:
            changed.setattr(other, "_save_index", lambda its: (write_list(kept), write_its_list(its)))
            other.save("float", "code for floats")

    monkeypatch.setattr(one, "_save_index", meanwhile)
    one.save("int", "code for integers")
    for key, code in (("int", "code for integers"), ("float", "code for floats")):
        assert other.load(key) in (code, None)
        other.save(key, code)
        assert one.load(key) == code


def test_a_kernel_is_not_that_of_yesterday_while_its_file_is_written(two_processes, monkeypatch):
    one, other = two_processes
    one.save("int", "yesterday's")
    one._source_stamp = other._source_stamp = "changed"
    write, found = one._save_data, []
    monkeypatch.setattr(one, "_save_data", lambda *how: (found.append(other.load("int")), write(*how)))
    one.save("int", "today's")
    assert [*found, other.load("int")] == [None, "today's"]


# --- what a kernel reaches --------------------------------------------------------------------------------------------


def _copied(folder):
    source = Path(domainpar.__file__).parent
    for package in ("domainpar", "partitioners"):
        shutil.copytree(source.parent / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def _ran(program, folder, **environment):
    """What a program prints, and what it says on standard error; variables that are None are unset."""
    asked = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "kept"), **environment}
    asked = {name: value for name, value in asked.items() if value is not None}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=asked, capture_output=True, text=True, timeout=patient(240)
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip(), ended.stderr


MINE = {
    "units": "FIELD = 2.0\n",
    "helix": "from numba import njit\nfrom mine.units import FIELD\n\n\n@njit\ndef bent(x):\n    return FIELD * x\n",
    "fit": KERNEL.replace("\n\n\n", "\nfrom mine import helix\n\n\n").replace("a + b", "helix.bent(a) + b"),
}
"""Files of a package whose kernel takes a function of one of them, which takes a constant of another."""

FITTED = """
from mine.fit import add
print(add(3.0, 1.0), sum(add.stats.cache_hits.values()))
"""


def _changed(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_kernels_on_disk_are_not_those_of_before_a_function_or_a_constant_of_another_file_changed(tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    for name, text in MINE.items():
        (package / f"{name}.py").write_text(text)
    path = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(domainpar.__file__).parents[1])))}
    assert [_ran(FITTED, tmp_path, **path)[0] for _ in range(2)] == ["7.0 0", "7.0 1"]
    _changed(package / "helix.py", "FIELD * x", "10 * FIELD * x")
    assert _ran(FITTED, tmp_path, **path)[0] == "61.0 0"
    _changed(package / "units.py", "2.0", "3.0")
    assert _ran(FITTED, tmp_path, **path)[0] == "91.0 0"


OPERATION = """
import torch
from domainpar.nn import operations
operations.multiply_rows(torch.float32, torch.float32)
(kernel,) = operations._alive
print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_a_kernel_is_taken_from_disk_until_a_file_changes_whose_operators_it_uses(tmp_path):
    _copied(tmp_path)
    assert [_ran(OPERATION, tmp_path)[0] for _ in range(2)] == ["0 1", "1 0"]
    lanes = tmp_path / "domainpar" / "nn" / "lanes.py"
    lanes.write_text(lanes.read_text() + "\n# changed\n")
    assert _ran(OPERATION, tmp_path)[0] == "0 1"


def _modules():
    """All modules of the package but those that run, or write, something else when they are imported."""
    for found in pkgutil.walk_packages(domainpar.__path__, "domainpar."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


@cache
def _tree(file):
    return ast.parse(Path(file).read_text())


def _reached(function):
    """Files of all functions that a kernel mentions, and that these mention, in any file of ours."""
    files, left = set(), [function]
    while left:
        function = inspect.unwrap(left.pop())
        if function not in files and function.__module__.startswith("domainpar"):
            files.add(function)
            here = function.__globals__
            modules = [here.get(name) for name in function.__code__.co_names]
            theirs = (vars(module) for module in modules if isinstance(module, ModuleType))
            named = [names.get(name) for name in function.__code__.co_names for names in (here, *theirs)]
            left += [item.py_func if isinstance(item, Dispatcher) else item for item in named if callable(item)]
            left = [item for item in left if isinstance(inspect.unwrap(item), FunctionType)]
    return {function.__code__.co_filename for function in files}


def _all_kernels(monkeypatch):
    made = []
    monkeypatch.setattr(operations, "_address", lambda function: made.append(function) or 0)
    for kinds in ((torch.float32,) * 5, (torch.float64,) * 5, (torch.float32,) + (torch.bfloat16,) * 4):
        for operation in vars(operations).values():
            if hasattr(operation, "cache_clear") and operation.__module__ == operations.__name__:
                count = len(inspect.signature(operation).parameters)
                width = (32,) if "width" in inspect.signature(operation).parameters else ()
                operation.__wrapped__(*width, *kinds[: count - len(width)])
    found = {id(item): item for module in _modules() for item in vars(module).values() if isinstance(item, Dispatcher)}
    kept = [kernel.py_func for kernel in found.values() if isinstance(kernel._cache, compiling._CachedKernels)]
    return kept, made


def test_the_stamp_of_each_kernel_covers_all_functions_that_it_reaches(monkeypatch):
    kept, operations_made = _all_kernels(monkeypatch)
    assert len(kept) > 80
    assert len(operations_made) >= 20
    for function in (*kept, *operations_made):
        assert _reached(function) <= compiling.files_of(function), function


def test_what_operations_reach_is_in_other_files_and_rooms(monkeypatch):
    _, made = _all_kernels(monkeypatch)
    files = {function.__name__: compiling.files_of(function) for function in made}
    names = {Path(file).name for file in files["layer_forward"]}
    assert {"operations.py", "kernels.py", "lanes.py", "noise.py", "products.py", "integer_sums.py"} <= names


def test_no_kernel_is_kept_by_the_rule_of_numba():
    for package in (domainpar, partitioners):
        for file in Path(package.__file__).parent.rglob("*.py"):
            if not all(word in file.read_text() for word in ("jit", "cache")):
                continue
            calls = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Call))
            numbas = [call for call in calls if any(word.arg == "cache" for word in call.keywords)]
            assert not [call.lineno for call in numbas if "jit" in ast.unparse(call.func)], file


# --- where nothing can be kept ----------------------------------------------------------------------------------------

ADD = """
import os
from domainpar.common import compiling
compiling.watch_compiling(talks=True)
{before}
from slow_kernel import add
print(add(1, 2), add(1.0, 2.0), add.stats.cache_path, os.listdir())
"""


@pytest.mark.parametrize("home", ["a file", None], ids=["a home that cannot be written", "a user without a home"])
def test_kernels_are_compiled_without_a_place_to_keep_them_and_that_is_said_once(tmp_path, home):
    (tmp_path / "slow_kernel.py").write_text(KERNEL)
    (tmp_path / "__pycache__").write_text("a file, so that no directory can be made here")
    nobody = "os.path.expanduser = lambda path: path" if home is None else ""
    places = {"HOME": home and str(tmp_path / "slow_kernel.py"), "NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": None}
    path = str(Path(domainpar.__file__).parents[1])
    words, said = _ran(ADD.format(before=nobody), tmp_path, PYTHONPATH=path, **places)
    assert words.startswith("3 3.0 None ")
    assert "'~'" not in words
    assert said.count("\n") == 1
    assert "they cannot be kept" in said
    assert "NUMBA_CACHE_DIR=DIR" in said


def test_a_full_disk_is_named_and_kernels_work_and_a_damaged_one_is_compiled_anew(tmp_path):
    (tmp_path / "slow_kernel.py").write_text(KERNEL)
    # Python keeps what it compiles of modules, too, and takes half a file for a whole one: not in this program.
    path = {"PYTHONPATH": str(Path(domainpar.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    words, said = _ran(ADD.format(before=full), tmp_path, **path)
    assert words.startswith("3 3.0 ")
    assert re.search(rf"{tmp_path}/kept/\S+: File too large; NUMBA_CACHE_DIR", said)
    assert said.count("\n") == 1, "once, and never that later runs load them"
    for spoilt in ("*.nbi", "*.nbc"):
        assert "compiling: " in _ran(ADD.format(before=""), tmp_path, **path)[1]
        assert "compiling: " not in _ran(ADD.format(before=""), tmp_path, **path)[1]
        for file in (tmp_path / "kept").rglob(spoilt):
            file.write_bytes(file.read_bytes()[:9])
    assert "compiling: " in _ran(ADD.format(before=""), tmp_path, **path)[1]
