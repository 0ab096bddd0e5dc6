"""The site of the pages: every link leads somewhere, nothing is fetched, and the library is in it with its shapes."""

import importlib.util
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("mkdocs", reason="mkdocs is not installed (make docs)")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (make docs)")
PROGRAM = Path(__file__).resolve().parents[1] / "docs" / "build_site.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("build_site", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_built_and_has_the_library_with_shapes_and_errors(program):
    assert program.main() == 0
    page = (program.SITE / "html" / "docs" / "reference" / "api.html").read_text()
    for said in ("split_graph", "World", "int64 [2, E]", "Raises:", "Collective"):
        assert said in page, said
    flags = (program.SITE / "html" / "docs" / "reference" / "flags.html").read_text()
    assert "--domain-size" in flags


def test_a_link_that_leads_nowhere_ends_it(program, monkeypatch, capfd):
    lay_out = program.lay_out

    def with_a_dead_link(source):
        lay_out(source)
        (source / "docs" / "labels.md").write_text("# Labels\n\n[nowhere](nowhere.md)\n")

    monkeypatch.setattr(program, "lay_out", with_a_dead_link)
    assert program.main() == 1
    assert "nowhere.md" in capfd.readouterr().err


def test_what_would_be_fetched_is_seen(program, tmp_path):
    (tmp_path / "page.html").write_text('<link href="//fonts.example/a.css"><a href="https://example">fine</a>')
    assert list(program.fetched(tmp_path)) == ["page.html: //fonts.example/a.css"]
    shutil.rmtree(tmp_path)
