"""The pages: their links lead somewhere, their rules exist, their programs run, what is generated is up to date."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from domainpar.testing import patient
from domainpar.tracking import config
from domainpar.tracking.command_line import parse

ROOT = Path(__file__).parents[1]
FOLDERS = ("domainpar", "partitioners", "tests", "bench", "docs", "examples", "launch")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
SAME_BITS = (ROOT / "docs/same_bits.md").read_text(encoding="utf-8")


def anchors(path):
    """The names of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_of_the_repository(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert path.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(path), target


def sources():
    for folder in FOLDERS:
        yield from (ROOT / folder).rglob("*.py")


def test_every_rule_that_the_sources_name_is_on_the_page_of_the_same_bits():
    rules = {int(number) for number in re.findall(r"^\*\*Rule (\d+):", SAME_BITS, re.MULTILINE)}
    assert rules == set(range(1, 10))
    for path in sources():
        for named in re.findall(r"\brules? (\d+)(?:(?: to | and |, )(\d+))?", path.read_text(encoding="utf-8")):
            assert {int(number) for number in named if number} <= rules, path


def test_the_files_and_tests_of_the_nine_rules_exist():
    rows = re.findall(r"^\| (\d) \|[^|]*\|([^|]*)\|([^|]*)\|$", SAME_BITS, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 10))
    tests = (ROOT / "tests/nn/test_rules.py").read_text(encoding="utf-8")
    for _, files, names in rows:
        for file in re.findall(r"`([^`]+)`", files):
            assert (ROOT / "domainpar" / file).is_file(), file
        for name in re.findall(r"`([^`]+)`", names):
            assert f"def test_rule_{name.removesuffix('...')}" in tests, name


def test_nothing_refers_to_a_document_outside_the_repository():
    for path in [*sources(), *PAGES]:
        if path != Path(__file__):
            assert not re.search(r"\bDESIGN\b|\.\./shared|EXAMPLES\.md", path.read_text(encoding="utf-8")), path


def test_the_readme_can_be_read_in_two_minutes():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 140
    assert max(len(line) for line in lines if not line.startswith(("|", "!"))) <= 120


def test_the_pages_of_flags_and_names_are_up_to_date():
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "docs/write_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page, write in module.PAGES.items():
        kept = (ROOT / "docs/reference" / page).read_text(encoding="utf-8")
        assert kept == write(), f"python docs/write_reference.py writes docs/reference/{page} anew"
    for page, table in module.TABLES.items():
        kept = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert kept == module.with_table(kept, table()), f"python docs/write_reference.py writes a table of {page} anew"


def commands(text):
    """Each command that a page types, in a block of its own or inside a sentence: its name and its words."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line.split("  #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for typed in [*lines, *(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", sentences))]:
        for name, words in re.findall(r"-m (?:-- )?domainpar\.(\w+)([^;&|]*)", typed):
            yield name, shlex.split(words)


# Commands of RESULTS are those of the commits that it names, and the page of flags has what --help prints.
WITH_COMMANDS = [
    page
    for page in PAGES
    if page.name not in ("RESULTS.md", "flags.md") and "-m domainpar." in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_page_has_flags_that_exist_and_go_together(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    for file, written in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", text, re.DOTALL | re.MULTILINE):
        Path(file).write_text(written, encoding="utf-8")
    for name, words in commands(text):
        config_class = getattr(config, "".join(map(str.capitalize, name.split("_"))) + "Config")
        parse(config_class, "", words)


def test_the_program_of_the_readme_runs_as_it_is_typed(tmp_path):
    pytest.importorskip("torch_geometric")
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", program]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=patient(120))
