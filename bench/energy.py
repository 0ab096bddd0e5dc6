"""What does a command take: seconds, joules and a price?

    python bench/energy.py mpiexec -n 2 python -m domainpar.train --epochs 2
    python bench/energy.py --watts 150 --price 2.5 mpiexec -n 2 python -m domainpar.train --epochs 2

Joules are those of all processors of this machine (RAPL, as Linux shows it to root) and of all its GPUs (NVML, with the
package `pynvml`), whatever else runs there. Where neither can be read, they are `--watts` times the seconds: a figure
of yours, and the line says so. `--price` is of an hour of the machine. For an epoch, divide by the epochs of the run.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--watts", type=float, help="of the machine, where no counter can be read")
    parser.add_argument("--price", type=float, help="of an hour of the machine")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.command:
        parser.error("name a command")
    counters = {name: counter for name, counter in (("RAPL", of_processors()), ("NVML", of_gpus())) if counter}
    before, began = [counter() for counter in counters.values()], time.perf_counter()
    code = subprocess.run(options.command, check=False).returncode
    seconds = time.perf_counter() - began
    joules, by = sum(counter() for counter in counters.values()) - sum(before), " and ".join(counters)
    if not counters:
        joules, by = (options.watts or 0.0) * seconds, f"{options.watts:g} W as given" if options.watts else ""
    energy = f", {joules:,.0f} J ({by})" if by else ", no counter of energy can be read: give --watts"
    price = f", {options.price * seconds / 3600:.4f} at {options.price:g} an hour" if options.price else ""
    print(f"{seconds:.1f} s{energy}{price}")
    return code


def of_processors(powercap: Path = POWERCAP) -> Callable[[], float] | None:
    """The joules of all processors so far; None where they cannot be read."""
    packages = sorted(place for place in powercap.glob("intel-rapl:*") if place.name.count(":") == 1)
    last: dict[Path, int] = {}
    turns = dict.fromkeys(packages, 0)

    def read() -> float:
        total = 0
        for place in packages:
            now = int((place / "energy_uj").read_text())
            if now < last.get(place, 0):  # it begins anew: every quarter of an hour or so, once at most between calls
                turns[place] += int((place / "max_energy_range_uj").read_text())
            last[place] = now
            total += now + turns[place]
        return total / 1e6

    try:
        return read if packages and read() >= 0 else None
    except (OSError, ValueError):  # the kernel shows them to root alone
        return None


def of_gpus() -> Callable[[], float] | None:
    """The joules of all GPUs so far; None where NVIDIA's library is not there, or they do not count."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        read = lambda: sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1e3  # noqa: E731
        return read if handles and read() >= 0 else None
    except Exception:  # many kinds, all of which say that energy cannot be had
        return None


if __name__ == "__main__":
    raise SystemExit(main())
