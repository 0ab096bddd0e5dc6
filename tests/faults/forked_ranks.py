"""Ranks of `meeting_program.py` as copies of one process, which has read torch once for all of them.

Each line that it reads is one start: of each rank its variables and words, in JSON. It answers with a line of exit
codes and of what all of them said; one that has loaded MPI says so in the end.
"""

import atexit
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NoReturn

from faults.meeting_program import meet


def be_a_rank(environ: dict[str, str], words: Sequence[str], output: int) -> NoReturn:
    """What a copy does instead of reading on. It ends without looking once more at all that torch has made."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(environ)
    code: object = 0
    try:
        meet(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if "mpi4py.MPI" in sys.modules:
        sys.stdout.write("MPI was loaded\n")
    atexit._run_exitfuncs()  # of MPI, which ends well only so
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            copies = []
            for environ, words in json.loads(line):
                copies.append(os.fork())
                if not copies[-1]:
                    be_a_rank(environ, words, output.fileno())
            codes = [str(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])) for copy in copies]
            output.seek(0)
            sys.stdout.write(json.dumps([codes, output.read().decode()]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
