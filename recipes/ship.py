"""Make a network that is shipped of a finished run: its last weights, without optimiser, events and machine.

python recipes/ship.py RUN NAME [STORE]

writes domainpar/tracking/pretrained/NAME, with the module map of STORE, as `prepare` kept it there. Its card,
README.md, is written by hand; a filter, NAME-filter, has card and map of NAME, and no cuts of tracks.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import yaml

from domainpar.common.atomic_files import json_bytes
from domainpar.runs.checkpoint_files import CheckpointFiles
from domainpar.tracking.config import SHIPPED
from domainpar.tracking.events.store import MODULE_MAP
from domainpar.tracking.training.pretrained import PLACE

OF_THE_MACHINE = ("store", "threads", "ranks", "domain_size", "transport", "log_every", "device", "allocator")
KEPT = (
    "bitwise_problem", "exchanges", "model_code", "model_options", "parameters_sha256", "seconds", "started", "state",
    "steps", "versions", "machine",
)  # fmt: skip


def ship(run: Path, name: str, joined_in: Path | None = None) -> Path:
    """Copy what a shipped network consists of; returns its directory."""
    place, files = PLACE / name, CheckpointFiles(run / "checkpoints")
    shutil.rmtree(place / "checkpoints", ignore_errors=True)
    step = files.pointed("last")
    content = files.read(step) | {"optimizer.safetensors": b""}
    content.pop("manifest.json", None)
    # The recipe ends with these weights, whichever step had the best metric.
    content["state.json"] = json_bytes(json.loads(content["state.json"]) | {"best": None, "best_step": None})
    CheckpointFiles(place / "checkpoints").write(int(step.removeprefix("step_")), content, best=True)
    about = json.loads((run / "run.json").read_text())
    # Its events are known by their hashes: what it was trained on is not scored as if it were new.
    joined_by = SHIPPED + name.removesuffix("-filter")
    store = about["store"] | {"path": "", "absolute": "", "joined_by": joined_by}
    kept = {key: about[key] for key in KEPT} | {"store": store, "tasks": about.get("tasks")}
    (place / "run.json").write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    flags = yaml.safe_load((run / "config.yaml").read_text())
    flags = {key: value for key, value in flags.items() if key not in OF_THE_MACHINE}
    (place / "config.yaml").write_text(yaml.safe_dump(flags, sort_keys=False))
    validated = [line for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if '"val"' in line]
    (place / "metrics.jsonl").write_text("".join(validated))
    if not name.endswith("-filter"):
        shutil.copy(run / "tracks.json", place / "tracks.json")
    if joined_in is not None:
        shutil.copy(joined_in / MODULE_MAP, place / MODULE_MAP)
    return place


if __name__ == "__main__":
    print(ship(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:])))
