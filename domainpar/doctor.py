"""Look whether this machine, this Python and this launcher can run domainpar: a table to put into a bug report.

Works alone and after any launcher. The exit code is 0 when nothing failed, 1 otherwise.

Examples:
  python -m domainpar.doctor                                   this machine; starts two ranks of its own to try
  mpiexec -n 4 python -m domainpar.doctor                      these four ranks; also after torchrun or srun
  python -m domainpar.doctor --verify store --run runs/0001    every event and checkpoint against its hash
  srun -n 64 python -m domainpar.doctor --certify              same bits, transports, scaling, memory: one file to send
"""

import sys
from collections.abc import Sequence

from domainpar.command_line import run_command
from domainpar.config import DoctorConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Look at everything as the command line says; returns the exit code."""
    return run_command(DoctorConfig, _work, __doc__, argv)


def _work(config: DoctorConfig) -> int:
    from domainpar.diagnosis.doctor import diagnose

    return diagnose(config)


if __name__ == "__main__":
    sys.exit(main())
