"""Programs with a time limit: nothing of them is left, and all they printed is there."""

import math
import signal
import sys

from domainpar.measure.programs import run_limited


def test_programs_that_hang_are_killed_with_all_they_started(tmp_path):
    program = "import subprocess, sys, time; print('began', flush=True); subprocess.run(['sleep', '100'])"
    ended = run_limited([sys.executable, "-c", program], 1.0)
    assert ended.code is None
    assert ended.output == "began\n"
    assert ended.seconds < 10


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


def test_a_program_that_is_interrupted_may_end_its_own_ranks():
    program = (
        "import time\n"
        "try: print('began', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt: time.sleep(0.3); print('ended its ranks')"
    )
    ended = run_limited([sys.executable, "-c", program], 1.5, stop=signal.SIGINT, seconds_to_leave=5.0)
    assert (ended.code, ended.output) == (None, "began\nended its ranks\n")
