"""No way from a file to running code: what could do that is nowhere in the program, so nobody can switch it on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from marks import fault

ROOT = Path(__file__).parents[1]
FILES = sorted(path for room in ("domainpar", "partitioners") for path in (ROOT / room).rglob("*.py"))

NEVER_CALLED = {
    "eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads",
    "shelve.open", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "torch.jit.load", "os.system",
    "os.popen", "joblib.load", "pandas.read_pickle", "pd.read_pickle", "dill.loads", "cloudpickle.loads",
}  # fmt: skip
NEVER_NAMED = {"extractall", "unpack_archive", "read_pickle", "tarfile", "dill", "shelve", "marshal"}

# Ranks of tests are processes: what they hand each other never was in a file that somebody else wrote.
OWN_PICKLES = {"domainpar/testing.py": {"pickle.loads", "pickle.load"}}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(tree: ast.AST) -> list[str]:
    """Everything in a program that could run what a file says."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and dotted(node).split(".")[-1] in NEVER_NAMED:
            found.append(dotted(node))
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = {module, *(alias.name for alias in node.names), *(f"{module}.{alias.name}" for alias in node.names)}
            found += sorted(names & (NEVER_NAMED | NEVER_CALLED))
        if not isinstance(node, ast.Call):
            continue
        name, given = dotted(node.func), {one.arg: one.value for one in node.keywords}
        if name in NEVER_CALLED or name.endswith((".extract", ".run_module", ".run_path")):
            found.append(name)
        if name == "torch.load" and not is_constant(given.get("weights_only"), True):
            found.append("torch.load without weights_only=True")
        if name in ("np.load", "numpy.load") and not is_constant(given.get("allow_pickle"), False):
            found.append("np.load without allow_pickle=False")
        if is_constant(given.get("shell"), True):
            found.append(f"{name} with a shell")
        found += [f"{name}({word}=...)" for word in ("weights_only", "allow_pickle")
                  if word in given and not isinstance(given[word], ast.Constant)]  # fmt: skip
    return found


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@fault(19)
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_in_the_program_can_run_what_a_file_says(path):
    name = str(path.relative_to(ROOT))
    found = set(unsafe(ast.parse(path.read_text()))) - OWN_PICKLES.get(name, set())
    assert not found


UNSAFE = (
    "eval(text)", "exec(text)", "pickle.load(file)", "from pickle import loads", "yaml.load(text, Loader=yaml.Loader)",
    "torch.load(path)", "torch.load(path, weights_only=False)", "torch.load(path, weights_only=trusted)",
    "np.load(path)", "np.load(path, allow_pickle=True)", "zipfile.ZipFile(path).extractall()", "archive.extract(name)",
    "import tarfile", "subprocess.run(text, shell=True)", "pd.read_pickle(path)", "from shutil import unpack_archive",
)  # fmt: skip


@pytest.mark.parametrize("text", UNSAFE)
def test_what_is_looked_for_is_found(text):
    assert unsafe(ast.parse(text))
