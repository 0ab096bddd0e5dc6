"""A process that has imported what `program.py` needs, and forks ranks of it: a job costs no imports then.

Read from its input, a line of JSON for each job: the `name` of the function, the `environments` of its ranks, the files
of their `outputs`, and the `seconds` after which they are killed. Written to its output: their exit codes.
"""

import json
import os
import signal
import sys
import time

import card
import program


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        ranks = []
        for environment, output in zip(job["environments"], job["outputs"]):
            if (rank := os.fork()) == 0:
                return become(job["name"], environment, output)
            ranks.append(rank)
        print(json.dumps(codes_of(ranks, job["seconds"])), flush=True)
    os._exit(0)  # the ranks alone leave logs


def become(name: str, environment: dict[str, str], output: str) -> None:
    """One rank, in the process that was forked for it; what it leaves at its end, it leaves as any other."""
    os.environ.clear()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    card.after_torch()  # as many GPUs as its environment says
    getattr(program, name)()


def codes_of(ranks: list[int], seconds: float) -> list[int]:
    """Exit codes of processes, negative for signals, once all have ended or been killed."""
    codes: dict[int, int] = {}
    give_up_at = time.monotonic() + seconds
    while len(codes) < len(ranks):
        for rank in set(ranks) - codes.keys():
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > give_up_at:
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[rank] for rank in ranks]


if __name__ == "__main__":
    main()
