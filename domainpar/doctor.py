"""Check whether this machine, this Python and this launcher can run domainpar: a table to put into a bug report.

Works alone and after any launcher. The exit code is 0 when nothing failed, 1 otherwise.

Examples:
  python -m domainpar.doctor                                   this machine; starts two ranks of its own to try
  mpiexec -n 4 python -m domainpar.doctor                      these four ranks; also after torchrun or srun
  python -m domainpar.doctor --verify store --run runs/0001    every event and checkpoint against its hash
"""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata

from domainpar.common.problems import error_text
from domainpar.parallel.launcher import started_as_root
from domainpar.tracking.command_line import run_command
from domainpar.tracking.config import DoctorConfig

NEEDED = {
    **{"numpy": "numpy", "llvmlite": "llvmlite", "numba": "numba", "torch": "torch", "pymetis": "pymetis"},
    **{"zarr": "zarr", "google_crc32c": "google-crc32c", "safetensors": "safetensors"},
    **{"yaml": "PyYAML", "msgspec": "msgspec", "pandas": "pandas", "tqdm": "tqdm", "rich": "rich"},
    **{"psutil": "psutil", "shtab": "shtab"},
}
"""What domainpar imports of others, in this order, and the package that it comes with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks of the command line; returns the exit code."""
    try:
        return run_command(DoctorConfig, _work, __doc__, argv)
    except Exception:
        broken = list(_broken())
        if not broken:
            raise
        if started_as_root():
            sys.stderr.write("".join(broken))
        return 1


def _broken() -> Iterator[str]:
    """An error for each package that cannot be imported: the checks, which import all, cannot report it then."""
    for module, package in NEEDED.items():
        try:
            import_module(module)
        except Exception as error:  # whatever a broken library makes of it
            try:
                version = metadata.version(package)
            except metadata.PackageNotFoundError:
                version = "(not installed)"
            reason = " ".join(str(error).split())
            what = f"{package} {version} cannot be imported: {type(error).__name__}: {reason}"
            yield error_text(what, None, "pip install domainpar in an environment of its own")


def _work(config: DoctorConfig) -> int:
    from domainpar.tracking.diagnosis.all_checks import diagnose

    return diagnose(config)


if __name__ == "__main__":
    sys.exit(main())
