"""Networks that are shipped: runs without events or optimiser, named `pretrained:NAME`."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import Problem
from domainpar.runs.directory import RUNS, read_run
from domainpar.tracking.config import SHIPPED
from domainpar.tracking.events.store import MODULE_MAP

PLACE = Path(__file__).resolve().parents[1] / "pretrained"


def source(run: str) -> Path:
    """The directory of a run, or of a network that is shipped; it is only read.

    Raises:
        Problem: If no network of this name is shipped.
    """
    if not run.startswith(SHIPPED):
        return Path(run)
    names = sorted(path.parent.name for path in PLACE.glob("*/run.json"))
    name = run.removeprefix(SHIPPED)
    if name not in names:
        known = ", ".join(SHIPPED + network for network in names)
        raise Problem(f"no network {name!r} is shipped", f"there are {known}" if known else "train one")
    return PLACE / name


def module_map_of(run: str) -> Path:
    """The module map that joined the events of a shipped network and of its filter.

    Raises:
        Problem: If no network of this name is shipped, or none with a map.
    """
    path = source(run).parent / run.removeprefix(SHIPPED).removesuffix("-filter") / MODULE_MAP
    if not path.is_file():
        with_maps = ", ".join(SHIPPED + path.parent.name for path in sorted(PLACE.glob(f"*/{MODULE_MAP}")))
        raise Problem(f"no module map comes with {run}", f"there are those of {with_maps}; or --module-map build")
    return path


def runs_of(joined_by: str, left_by: str | None = None) -> list[str]:
    """The flags of `infer` for events that the map of a shipped network joined, or that its filter left.

    Args:
        joined_by: The module map as it was named.
        left_by: sha256 of the parameters of the filter that chose the edges, if one did.

    Returns:
        Nothing for events of other maps and filters.
    """
    if left_by is not None:
        filters = {path.parent.name: read_run(path.parent).store.filter for path in PLACE.glob("*/run.json")}
        behind = [name for name, filtered in filters.items() if filtered and filtered["parameters_sha256"] == left_by]
        return ["--run", SHIPPED + behind[0]] if behind else []
    if not joined_by.startswith(SHIPPED):
        return []
    network = joined_by.removesuffix("-filter")
    has_filter = (PLACE / f"{network.removeprefix(SHIPPED)}-filter").is_dir()
    return ["--run", f"{network}-filter", "--then", network] if has_filter else ["--run", network]


def least_score_of(name: str) -> float | None:
    """The least score of the edges that a shipped network was trained on, by `NAME-filter`; None without a filter."""
    left = read_run(PLACE / name).store.filter
    return None if left is None else float(left["min_score"])


def as_run(run: str) -> Path:
    """The directory of a run that may be written to: a shipped network is copied to `runs/` first; on rank 0.

    Raises:
        Problem: If no network of this name is shipped, or another one lies in its place, or the copy cannot be written.
    """
    shipped = source(run)
    if not run.startswith(SHIPPED):
        return shipped
    copy = RUNS / f"pretrained-{shipped.name}"
    if not copy.exists():
        # Whole or not at all: another process may look for it. By files: folders of a package may be closed to writing.
        partial = RUNS / f".pretrained-{uuid.uuid4().hex}"
        try:
            # The map, of some MiB, is read where it is (`module_map_of`).
            for file in (path for path in shipped.rglob("*") if path.is_file() and path.name != MODULE_MAP):
                write_whole(partial / file.relative_to(shipped), file.read_bytes())
            partial.rename(copy)
        except OSError as error:
            if not copy.exists():  # else another process was first
                what = f"cannot copy {run} to {copy.absolute()}: {error.strerror} (errno {error.errno})"
                raise Problem(what, "make room there, or work in a directory that you may write to") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    ours, theirs = (file.read_bytes() if file.is_file() else None for file in (shipped / "run.json", copy / "run.json"))
    if ours != theirs:
        raise Problem(f"{copy} is not the network that is shipped as {run}", "move it away, or name it with --run")
    return copy
