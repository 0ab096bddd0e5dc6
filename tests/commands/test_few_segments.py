"""`prepare` refuses events whose segments are hardly among the candidate edges, and says why; no store is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_module_map_flags import write_files

from domainpar import prepare, train
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import MANIFEST, EventStore, WholeEvent
from domainpar.tracking.reco.performance.lost import count_segments
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.truth import truth_of

CM = (
    lambda hits: replace(hits, position=hits.position / 10),
    [],
    "only 6.4% of 405 true",
    "positions look like cm, not mm,",
)
M = (lambda hits: replace(hits, position=hits.position / 1000), [], "only 0.2% of 405 true", "look like m, not")
SWAPPED = (lambda hits: hits, ["--layer-pairs", "2.8-4.8, 4.8-6.8"], "no candidate edge in 2 events", "look swapped")


def prepared(place, *flags):
    """The exit code of a preparation of the files of a directory."""
    try:
        return prepare.main(["--source", "trackml", "--input", str(place), "--store", str(place / "store"), *flags])
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(("change", "flags", "what", "why"), [CM, M, SWAPPED], ids=["cm", "m", "swapped"])
def test_events_with_hardly_an_edge_are_refused_with_the_cause_and_leave_no_store(
    tmp_path, capfd, change, flags, what, why
):
    for seed in (1, 2):
        write_files(tmp_path, change(simulate_event(seed, 2000, f"{seed:09d}")))
    assert prepared(tmp_path, *flags) == 2
    printed, error = capfd.readouterr()
    assert f"domainpar: error: {what}" in error
    assert why in error
    assert "--least-segments 0" in error
    assert "hits: radius" in printed, "what was seen of them"
    assert "next:" not in printed
    assert not (tmp_path / "store" / MANIFEST).exists()
    assert prepared(tmp_path, *flags, "--least-segments", "0") == 0


def test_the_share_of_segments_that_is_asked_for_decides_and_less_than_nine_in_ten_is_told(tmp_path, capfd):
    for seed in (1, 2):
        write_files(tmp_path, simulate_event(seed, 2000, f"{seed:09d}"))
    told = "no network finds them"
    assert prepared(tmp_path, "--z0", "5") == 0  # 53.6 %
    assert told in capfd.readouterr().out
    assert prepared(tmp_path, "--z0", "5", "--least-segments", "0.6") == 2
    capfd.readouterr()
    assert prepared(tmp_path, "--overwrite") == 0
    assert told not in capfd.readouterr().out


@pytest.mark.parametrize("target", ["pt: [0.5, .inf]", "pt: [1.5, .inf], nhits: [5, .inf]"])
def test_particles_and_segments_that_are_told_are_those_of_the_target_of_the_map(tmp_path, capsys, target):
    flags = ["--events", "3", "--hits", "4000", "--module-map", "build", "--map-events", "12", "--map-target", target]
    assert prepare.main([*flags, "--least-segments", "0", "--store", str(tmp_path)]) == 0
    conditions = prepare.PrepareConfig(module_map="build", map_target=target).map_target.value
    printed, segments, targets = capsys.readouterr().out, 0, []
    store = EventStore(tmp_path)
    for record in store.events():
        with store.open(record) as event:
            truth = truth_of(event)
            segments += count_segments(truth, np.zeros((2, 0), np.int64), conditions).segments
            targets.append(
                int(truth.targets_among(np.unique(truth.particle_id[truth.particle_id > 0]), conditions).sum())
            )
    assert f" of {segments:,} true segments of target particles" in printed
    assert f"particles: {min(targets)} to {max(targets)} target particles per event (" in printed
    flags = ["--store", str(tmp_path), "--target", "pt: [0.3, .inf]", "--hidden", "16", "--graph-iters", "1"]
    assert train.main([*flags, "--max-steps", "1", "--out", str(tmp_path / "run")]) == 0
    with store.open(store.events("train")[0]) as event:
        held = count_segments(truth_of(event), WholeEvent(event).edge_index, {"pt": [0.3, float("inf")]})
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "no network finds" in line][:1]
    assert told.startswith(f"WARNING: {held.construction_efficiency:.1%} of {held.segments:,} segments of --target")
    assert f"learned for '{TrackCuts(target=conditions).target_text}'" in told
