"""Programs with a time limit: nothing of them is left, and all they printed is there."""

import math
import signal
import sys

import pytest
from waiting import has_ended, wait_until

from domainpar.measure.programs import run_limited


def test_programs_that_hang_are_killed_with_all_they_started():
    ended = run_limited(["/bin/sh", "-c", "sleep 1000 & echo $!; wait"], 1.0)
    assert ended.code is None
    wait_until(lambda: has_ended(int(ended.output)))


def test_the_worst_exit_code_of_several_is_kept_and_variables_are_taken_away(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    program = "import os, sys; print('PMI_SIZE' in os.environ); sys.exit(int(os.environ['CODE']))"
    ended = run_limited([sys.executable, "-c", program], 20.0, [{"CODE": "0"}, {"CODE": "3"}], ["PMI_"])
    assert (ended.code, ended.output) == (3, "False\nFalse\n")


def test_output_is_shown_line_by_line_as_it_comes_and_all_of_it():
    program = "import time\nfor line in 'ab': print(line, flush=True); time.sleep(0.4)\nprint('end', end='')"
    shown = []
    ended = run_limited([sys.executable, "-c", program], math.inf, show=shown.append)
    assert ended.code == 0
    assert [text for text in shown if text] == ["a\n", "b\n", "end"]
    assert "".join(shown) == ended.output


@pytest.mark.parametrize("in_background", [False, True])
def test_a_program_that_is_interrupted_may_end_its_own_ranks(in_background):
    """Also where SIGINT is ignored, as by what a script starts in the background, and would be by its programs."""
    program = (
        "import time\n"
        "try: print('began', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt: time.sleep(0.3); print('ended its ranks')"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if in_background else signal.default_int_handler)
    try:
        ended = run_limited([sys.executable, "-c", program], 4.0, stop=signal.SIGINT, seconds_to_leave=5.0)
        assert (signal.getsignal(signal.SIGINT) is signal.SIG_IGN) == in_background
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.code, ended.output) == (None, "began\nended its ranks\n")
