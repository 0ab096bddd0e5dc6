"""Names and prose say things in the words of the field, and one class name means one thing."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("domainpar", "partitioners") for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "domainpar").rglob("*.md")])

WORDS = {
    r"roads?": "a path; in tracking a road is a search window",
    r"misfits?": "chi2",
    r"worth": "the quality of a track",
    r"told of": "what is shown, reported or known",
    r"(un)?learnt|taught": "trained",
    r"perceptrons?": "an MLP",
    r"ceilings?": "an upper bound",
    r"classical": "the CKF",
    r"handing on": "communication",
    r"the answer of": "the result of",
    r"hits around": "the local hit density",
    r"sees? off": "plain words",
    r"lessons?": "training data",
    r"worthy": "above a minimum quality",
    r"judge[sd]?|judging|judgements?": "to evaluate, to compare; a metric",
    r"voice|presence|strays": "a log, a status, ranks that differ",
    r"whoever|whomever|somebody|anybody|unasked": "the rank, process or user that is meant",
    r"known as|as of `\w+`": "the name; `as in` or `as for`",
    r"handed (on|out|over)|hands? over": "to pass, to send, to return",
}
"""Words that a reader of the field takes for something else, or for nothing, and what to write."""

WORDS_OF_ROOMS = {
    ("tracking/events", "tracking/part_loading.py", "prepare.py"): {
        r"(?<!\")told(?!\")": "what is held, known or shown",
        r"tells?(?! which)": "has, decides, shows",
        r"nobody": "no rank, no process, without communication",
        r"asked(?! for, but)": "the values, the flags",
    },
}
"""Words that some rooms have left behind; `told` is a name in files of stores."""


def prose_of(source):
    """The comments and strings of a program, docstrings and messages among them."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def misused(text, words=WORDS):
    return [(found[0], better) for word, better in words.items() for found in re.finditer(rf"(?i)\b({word})\b", text)]


def words_in(path):
    """The words that are refused in a file."""
    name = str(path.relative_to(ROOT / "domainpar")) if path.is_relative_to(ROOT / "domainpar") else ""
    of_rooms = [words for rooms, words in WORDS_OF_ROOMS.items() if name.startswith(rooms)]
    return {word: better for words in (WORDS, *of_rooms) for word, better in words.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    found = {number: wrong for number, line in enumerate(lines, 1) if (wrong := misused(line))}
    assert not found, f"{page}: {found}"


def test_docstrings_comments_and_messages_do_so_too():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {wrong}"
        for path in SOURCES
        for words in [words_in(path)]
        for line, text in prose_of(path.read_text(encoding="utf-8"))
        if (wrong := misused(text, words))
    ]
    assert not found, "\n".join(found)


def test_values_of_the_application_have_nouns_for_names():
    names = {"told", "said", "asked", "promise"}
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"
        for path in SOURCES
        if "tracking" in path.parts
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type == tokenize.NAME and token.string in names
    ]
    assert not found, "\n".join(found)


def test_a_word_in_a_wrong_sense_is_seen():
    assert misused("Drop tracks of less worth.") == [("worth", "the quality of a track")]
    assert not misused("Broad paths are kept.")
    assert list(prose_of("road = 1  # a road\n")) == [(1, "# a road")]


def test_a_name_of_a_class_means_one_thing():
    names = Counter(
        node.name.lstrip("_")
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert len(names) > 300
    assert not {name: count for name, count in names.items() if count > 1}
