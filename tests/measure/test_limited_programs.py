"""Programs with a time limit: nothing of them is left, and all they printed is there."""

import math
import sys

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


def test_a_program_whose_time_is_over_may_end_its_own_ranks():
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try: print('began', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt: time.sleep(0.3); print('ended its ranks')"
    )
    ended = run_limited([sys.executable, "-c", program], 4.0)
    assert (ended.code, ended.output) == (None, "began\nended its ranks\n")


def test_a_program_without_a_limit_is_waited_for():
    ended = run_limited([sys.executable, "-c", "import time; time.sleep(0.3); print('end', end='')"], math.inf)
    assert (ended.code, ended.output) == (0, "end")
