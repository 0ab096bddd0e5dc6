"""Mistakes to plant: small patches of the package, each with the tests that must see it.

They are rows of `tests/mistakes/ROOM.toml`. `make test` checks that each of them still fits the code. `make test-slow`
plants a dozen, or of these a SHARE, drawn by a seed, one at a time in copies of the package. To try all whose file or
sentence holds some words, or simply all:

    .venv/bin/python tests/planted.py [WORDS ...]
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from domainpar.measure.programs import Ended, run_limited
from domainpar.testing import patient

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("domainpar", "partitioners", "tests", "pyproject.toml")
SECONDS = 600.0
"""For the tests of one mistake. A test that would wait longer does not see it: people would not wait either."""


@dataclass(frozen=True)
class Mistake:
    """A patch of one file.

    Attributes:
        what: The mistake and what comes of it, in a sentence.
        file: The file, from the root.
        old: Text that stands once in the file.
        new: What the mistake makes of it.
        tests: The tests that must see it, as pytest takes them: file::name, without what is in brackets.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problems(self) -> Iterator[str]:
        """Why this row says nothing about the code and the tests as they are now."""
        count = (ROOT / self.file).read_text().count(self.old)
        if count != 1 or self.old == self.new:
            yield f"{self.old!r} stands {count} times in {self.file}, and becomes {self.new!r}"
        try:
            ast.parse((ROOT / self.file).read_text().replace(self.old, self.new))
        except SyntaxError as error:
            yield f"{self.file} is no Python with it: {error}"
        for test in self.tests:
            path, _, name = test.partition("::")
            if f"def {name}(" not in (ROOT / path).read_text():
                yield f"there is no {test}"
        if not self.tests:
            yield "no test is named"

    def plant(self, folder: Path) -> None:
        """Make the mistake in a copy of the package."""
        file = folder / self.file
        file.write_text(file.read_text().replace(self.old, self.new))


def mistakes() -> list[Mistake]:
    """All that are known, in a fixed order."""
    rows = (
        row
        for path in sorted((ROOT / "tests" / "mistakes").glob("*.toml"))
        for row in tomllib.loads(path.read_text())["mistake"]
    )
    return [Mistake(**row | {"tests": tuple(row["tests"])}) for row in rows]


def ran(tests: Iterable[str], mistake: Mistake | None = None) -> Ended:
    """The end of some tests in a copy of the package, with a mistake or without one."""
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        for part in COPIED:  # with the kernels that are compiled already
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, folder / part)
        if mistake is not None:
            mistake.plant(folder)
        pytest = [sys.executable, "-m", "pytest", "-x", "-m", "", "--no-header", *sorted(set(tests))]
        of_this_run = [name for name in os.environ if name.startswith("PYTEST_")]
        environment = {"PYTHONPATH": name, "OMP_NUM_THREADS": "1"}
        inside = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", name, *pytest]
        return run_limited(inside, patient(SECONDS), [environment], of_this_run)


def survives(mistake: Mistake) -> str:
    """Why a mistake counts as not seen; empty if a test that it names fails."""
    ended = ran(mistake.tests, mistake)
    if ended.code == 1:  # of pytest: some test failed. Another code is no test that has seen anything
        return ""
    return f"exit code {ended.code}: {mistake.what}\n  {mistake.file}: {mistake.old!r} -> {mistake.new!r}"


def main(words: list[str]) -> int:
    chosen = [each for each in mistakes() if not words or any(word in f"{each.file} {each.what}" for word in words)]
    sound = ran(test for mistake in chosen for test in mistake.tests)
    if sound.code != 0:
        print(f"{sound.output}\nthese tests fail without a mistake")
        return 1
    survivors = 0
    for mistake in chosen:
        why = survives(mistake)
        survivors += bool(why)
        print(f"NOT SEEN, {why}" if why else f"seen: {mistake.what}", flush=True)
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
