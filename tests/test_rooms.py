"""What the import contract in pyproject.toml cannot see: submodules of other packages, and what is loaded lazily."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import domainpar
from domainpar import tracking
from domainpar.testing import patient

ROOT = Path(__file__).parent.parent


@cache
def tree(path: Path) -> ast.Module:
    """What a file says, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names of what a file imports, at any depth, and of torch.distributed reached as an attribute."""

    def names() -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield f"{node.value.id}.{node.attr}"

    return frozenset(names())


def files_that_import(name: str, folder: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        if any(f"{found}.".startswith(f"{name}.") for found in imports(path))
    }


def test_torch_distributed_is_used_in_the_ranks_room_only():
    users = files_that_import("torch.distributed", "domainpar")
    assert users
    # testing.py starts ranks of its own, to hand them to the library as a user's program would.
    assert {user for user in users if not user.startswith("domainpar/parallel/")} <= {"domainpar/testing.py"}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("TrainConfig", {"train.py", "import_acorn.py"}),
        ("InferConfig", {"infer.py", "tracking/scoring/inference.py"}),
        ("PrepareConfig", {"prepare.py", "train.py", "infer.py", "estimate.py"}),
    ],
)
def test_all_flags_of_a_command_are_seen_by_it_alone(name, files):
    """What it calls is given the group of flags that it reads, or a small base of some groups."""
    rooms = [path for path in (ROOT / "domainpar").rglob("*.py") if path.parent.name != "config"]
    users = {str(path.relative_to(ROOT / "domainpar")) for path in rooms if name in path.read_text(encoding="utf-8")}
    assert users == files | {"tracking/command_line.py"}


def test_partitioners_need_numpy_numba_and_pymetis_only():
    third_party = {
        name.split(".")[0]
        for path in (ROOT / "partitioners").rglob("*.py")
        for node in ast.walk(tree(path))
        for name in imported_modules(node)
    } - set(sys.stdlib_module_names)
    assert third_party <= {"numpy", "numba", "pymetis", "partitioners"}


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


@pytest.mark.parametrize("name", domainpar.__all__)
def test_every_public_name_is_there(name):
    assert getattr(domainpar, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = domainpar.nothing


def test_importing_the_package_loads_no_library():
    heavy = "{'torch', 'numpy', 'numba', 'zarr', 'pandas', 'mpi4py'}"
    program = f"import sys, domainpar; print(sorted({heavy} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60), check=True
    )
    assert ended.stdout.strip() == "[]"


def test_who_splits_a_graph_loads_nothing_of_the_application():
    core = (
        "domainpar.split_graph, domainpar.parallelize, domainpar.InteractionNetwork, domainpar.World, domainpar.verify"
    )
    ranks = "import_module('domainpar.testing').run_ranks(world_size, 2)"
    others = "('domainpar.tracking', 'pandas', 'zarr', 'pyarrow', 'jinja2', 'matplotlib')"
    program = (
        "import sys, domainpar\nfrom importlib import import_module\ndef world_size(world): return world.size\n"
        f"if __name__ == '__main__':\n    {core}\n    {ranks}\n"
        f"    print([name for name in sys.modules if f'{{name}}.'.startswith(tuple(f'{{it}}.' for it in {others}))])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(120), check=True
    )
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize("package", [domainpar, tracking])
def test_types_and_names_of_a_package_are_the_same(package):
    typed = {
        alias.asname: node.module
        for node in ast.walk(tree(Path(package.__file__)))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("domainpar")
        for alias in node.names
    }
    assert typed == package._HOMES


def arrows() -> dict[str, set[str]]:
    """The modules that each of ours imports, also inside functions and for types only; a package is its `__init__`."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in ("domainpar", "partitioners")
        for path in (ROOT / folder).rglob("*.py")
    }
    return {
        name: {
            part
            for imported in imports(path)
            for part in (imported, imported.rpartition(".")[0])
            if part in names and part != name
        }
        for name, path in names.items()
    }


def circles(of: dict[str, set[str]]) -> list[str]:
    """Modules that lead back to themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            ahead.extend(new := of[ahead.pop()] - seen)
            seen |= new
        return seen

    return sorted(name for name in of if name in reached(name))


def test_no_file_imports_one_that_imports_it():
    of = arrows()
    of["domainpar"] = of["domainpar.tracking"] = set()  # public names are loaded when they are used
    assert circles(of) == []


def test_a_circle_of_three_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}) == ["a", "b", "c"]


def test_no_function_is_longer_than_70_lines():
    for folder in ("domainpar", "partitioners"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.FunctionDef):
                    documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
                    first = node.body[1] if documented and len(node.body) > 1 else node.body[0]
                    length = (node.end_lineno or 0) - first.lineno + 1
                    assert length <= 70, f"{path}: {node.name} has {length} lines"
