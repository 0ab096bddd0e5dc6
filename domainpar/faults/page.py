"""The page of the documentation about faults, made of the tables that the switch and the tests go by."""

from __future__ import annotations

from collections.abc import Iterator

from domainpar.faults.cases import CASES, Case
from domainpar.faults.points import ACTIONS, POINTS

HEAD = """# Faults

What can go wrong in a long run on shared machines, and what becomes of it. Every line has a test; `make test` runs the
quick ones, `make test-slow` and `make test-faults` those that take long. `python -m domainpar.faults` makes this page.

An error is one line, and one more that says what to do:

```
domainpar: error: <what> | event <id> | rank <r>/<P> host <h> | file <path> | step <s> phase <p>
hint: <what to do>
```

| exit code | meaning |
| --- | --- |
| 0 | done, or stopped on request with a checkpoint: `run.json` says `done` or `preempted` |
| 1 | failed while running |
| 2 | refused before work began: flags, configuration, data, launcher |
| 130 | interrupted by a second Ctrl-C |
| 143 | ended by SIGTERM without a checkpoint |

`python -m domainpar.doctor`, started the way the run was, says what of a machine works: add its output to a bug report.
"""

SWITCH = """
## Faults on purpose

One environment variable makes one rank fail at one place. Unset, every place costs one look at a variable.

```
DOMAINPAR_FAULT="rank=2,at=halo_bwd:1,step=3,do=kill" mpiexec -n 4 python -m domainpar.train
```

`step` counts from 0 and may be left away: then it happens the first time.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([HEAD, *_cases(), SWITCH, *_table("at=", POINTS), "", *_table("do=", ACTIONS), ""])


def _cases() -> Iterator[str]:
    for group, cases in CASES.items():
        yield from (
            f"## {group}",
            "",
            "| | what happens | what becomes of it | to see it |",
            "| --- | --- | --- | --- |",
        )
        yield from (_row(case) for case in cases)
        yield ""


def _row(case: Case) -> str:
    outcome = case.outcome
    if case.missing:
        outcome = f"{outcome} Not tested: {case.missing}.".strip()
    return f"| {case.number} | {case.fault} | {outcome} | {f'`{case.inject}`' if case.inject else ''} |"


def _table(name: str, rows: dict[str, str]) -> Iterator[str]:
    yield from (f"| `{name}` | |", "| --- | --- |")
    yield from (f"| `{key}` | {meaning} |" for key, meaning in rows.items())
