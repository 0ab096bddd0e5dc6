"""All time-outs and pauses, in seconds, the shortest first: how long anything waits, and why not longer or shorter.

Many depend on each other: a rank that ends a run must leave the others time to print why.
`tests/common/test_timeouts.py` holds them in order. What a user can set has its default here.
"""

from __future__ import annotations

SPIN = 2e-4
"""A rank with a core of its own polls MPI without a nap: most messages come sooner."""

LONGEST_NAP = 5e-4
"""Between two polls of MPI by a rank that waits long: longer than `SPIN`, short beside large messages."""

POLL_PER_RANK = 5e-4
"""Added to a watcher's pause for each rank of the run: one process serves all their questions."""

MEETING_POLL = 0.005
"""Between two looks whether all ranks have come, or want to leave: nothing else happens meanwhile."""

ANSWER_POLL = 0.05
"""Between two looks whether a process that holds a lock has given it back."""

WATCH_POLL = 0.1
"""Between two looks of a watcher for a failure of others. It runs beside the work, so longer than `MEETING_POLL`."""

LOCK_LOOKED_AT = 0.2
"""A lock may be held for a moment by a process that only looks whether it is. Some `ANSWER_POLL`."""

BEAT = 0.5
"""Between two signs of life of a watcher, some polls long: they are written through the network."""

LINGER = 0.5
"""The rank that serves the store ends this much after the others, some `WATCH_POLL`: they read the failure first."""

FORWARDING = 0.5
"""Between a rank's last line and its abort: mpiexec forwards output, but not after an abort. Shorter than `REPORT`."""

PATIENCE = 1.0
"""A rank that has waited for others this long counts as waiting, not as the one they wait for. Some `BEAT`, so that the
board shows it."""

REPORT = 1.0
"""A rank that saw others fail waits this long before it ends too, which may end the job, so that they can print why.
Longer than `FORWARDING` and `LINGER`, which the printing rank needs."""

LOOK = 1.0
"""Between two looks, while ranks part, whether one of them waits for a call that will never be made."""

COMPILING_SILENCE = 1.0
"""Kernels of numba load within this time; if it takes longer, they are compiled, and the user is informed."""

SIGNS_OF_LIFE = 2.5 * BEAT
"""Between two readings of the board: a rank without a new sign of life by then has ended. More than two `BEAT`."""

ORPHAN = 2.0
"""Time for ranks whose store is gone to end by themselves, with their own message. Longer than `REPORT`."""

LEAVING = 2.0
"""From a request to end a program to killing it with all it has started; longer than `REPORT`, for launchers."""

BOARD = 3.0
"""All of a reading of the board: longer than `SIGNS_OF_LIFE`. Else it lies on a machine that stopped."""

SILENCE = 10.0
"""A command that has printed nothing for so long prints what it is doing. Long beside the lines of short work."""

PROBE = 20.0
"""Wait of ranks that the doctor starts for each other: they do nothing that takes long."""

LAUNCHER_ANSWER = 20.0
"""Time for a launcher or library to print its version."""

DOCTOR_REPORT = 30.0
"""Ranks that cannot meet leave rank 0 of the doctor this time for the report: longer than `LAUNCHER_ANSWER`."""

DOCTOR = 60.0
"""Wait of the doctor's ranks for each other: longer than `DOCTOR_REPORT`."""

STARTING = 60.0
"""Python and torch start from a cold network disk; on top of it comes what the program does. Longer than `PROBE`."""

CONNECT = 60.0
"""Connecting to a store that is known to be served, by a program that may still start. Shorter than `JOIN`."""

GRACE = 60.0
"""The library's own limit comes this much after a deadline of ours, which names ranks: longer than `BOARD`."""

COMPILING = 100.0
"""A rank that waits so long for another one's compiler compiles for itself. Shorter than `STEP`: the others wait."""

STEP = 120.0
"""Default wait of a rank for the others once a first step is done: `--timeout`."""

SMALL_GRAPH = 120.0
"""Wait for ranks as threads on a small graph, with any model of a user's."""

JOIN = 300.0
"""Default wait until all ranks have come: `--join-timeout`. Nodes of a job start minutes apart."""

FIRST_STEP = 300.0
"""Default wait of a rank for the others: in a user's program, and in a run up to the end of the first step,
which reads, compiles and allocates; longer than `STEP` and `COMPILING`."""
