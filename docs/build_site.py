"""Build the pages as a site that opens from a disk without a network: python docs/build_site.py (make docs).

Pages keep their places, so that links between them, and to programs, lead where they lead in the repository. The pages
of the API are written of docstrings. A link that leads nowhere, or a page that would fetch something, ends it.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import domainpar

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "LICENSE", "CITATION.cff", "pyproject.toml")
FOLDERS = {
    "docs": "*",
    "bench": "*",
    "examples": "*",
    "launch": "*",
    "recipes": "*",
    "tests": "*.py",
    "domainpar": "*.py",
}
"""What pages link to: whole folders, and programs of others."""


def lay_out(source: Path) -> None:
    """Copy pages, pictures and programs, each to its place, and write the pages of the API."""
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in tracked:
        folder = name.partition("/")[0]
        if name in PAGES or (folder in FOLDERS and Path(name).match(FOLDERS[folder])):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    (source / "docs" / "reference" / "api.md").write_text(api())


def api() -> str:
    """A page of all public names, with what their docstrings say of arguments, shapes, units and errors."""
    lines = ["# The library", "", "*Collective* means: every rank must call it. Shapes stand in brackets.", ""]
    for name in sorted(domainpar.__all__, key=str.lower):
        value = getattr(domainpar, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            lines += [f"::: {value.__module__}.{value.__qualname__}", ""]
    return "\n".join(lines)


def fetched(html: Path) -> Iterator[str]:
    """What a page would load from elsewhere, with the page."""
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\s\">]+)", re.IGNORECASE)
    for page in sorted(html.rglob("*.html")):
        for address in loads.findall(page.read_text(encoding="utf-8")):
            if 'rel="canonical"' not in address:
                yield f"{page.relative_to(html)}: {address}"


def main() -> int:
    """Build the site; returns the exit code."""
    lay_out(SITE / "source")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml")]
    if subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode:
        return 1
    if strangers := list(fetched(SITE / "html")):
        print("these would be fetched when a page is looked at:", *strangers, sep="\n  ", file=sys.stderr)
        return 1
    count = len(list((SITE / "html").rglob("*.html")))
    print(f"{count} pages: {SITE / 'html' / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
