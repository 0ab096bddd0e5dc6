"""The campaign for the first card: it goes on where it stopped, notes what fails, and runs on a pretended card."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import has_ended, wait_until

CAMPAIGN = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "campaign.py"


@pytest.fixture(scope="module")
def campaign():
    spec = importlib.util.spec_from_file_location("campaign", CAMPAIGN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_known_is_not_done_again_and_what_failed_is(campaign, tmp_path, capsys):
    done = []

    def run(name, fails=False):
        def call():
            done.append(name)
            if fails:
                raise RuntimeError("too bad")
            return {"figure": 1.5}

        return call

    path = tmp_path / "deeper" / "notes.jsonl"
    notes = campaign.Notes(path)
    notes.once("times", "one", run("one"))
    assert "too bad" in notes.once("times", "two", run("two", fails=True))["error"]
    later = campaign.Notes(tmp_path / "elsewhere.jsonl", known=path)
    assert later.once("times", "one", run("one"))["figure"] == 1.5
    assert list(campaign.failed(later, "times")) == ["two"]
    later.once("times", "two", run("two"))
    assert done == ["one", "two", "two"]
    assert list(campaign.failed(later, "times")) == []
    campaign.Notes(path, again=True, only="^one$").once("times", "one", run("one"))
    assert done[-1] == "one"
    assert campaign.Notes(path, again=True, only="^one$").once("times", "two", run("two")) == {}
    assert len(done) == 4
    capsys.readouterr()
    campaign.table(later, None)
    assert "| what | figure |\n| --- | --- |\n| one | 1.5 |\n| two | 1.5 |" in capsys.readouterr().out


@pytest.mark.slow
def test_what_takes_too_long_is_cut_off_with_all_that_it_started_and_its_words_are_kept(campaign):
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    words = f"import subprocess, sys; child = {child}; print('child', child.pid, flush=True); child.wait()"
    with pytest.raises(RuntimeError, match=r"cut off after 10 s: .*child \d+") as cut_off:
        campaign.program(["-c", words], 10.0)
    (number,) = re.findall(r"child (\d+)", str(cut_off.value))
    wait_until(lambda: has_ended(int(number)))
    with pytest.raises(RuntimeError, match="exit code 3: why"):
        campaign.program(["-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])


def test_a_card_is_timed(tmp_path):
    sys.path.append(str(CAMPAIGN.parents[2] / "tests" / "pretended_gpu"))
    import card
    from random_store import write_random_store

    try:
        environment = card.environment()
    except card.Missing as why:
        pytest.skip(str(why))
    store = write_random_store(tmp_path / "store")
    words = [CAMPAIGN.with_name("one_card.py"), store, "domainpar", "16", "2", "full", "--repeats", "2"]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["edges"] > 0
    assert figures["step ms"] > figures["inference ms"] > 0
    assert figures["card"] == "pretended GPU"
