"""`--preset`: flags that a publication's selection sets, below a file and below the flags themselves."""

from __future__ import annotations

import numpy as np
import pytest

from domainpar import prepare
from domainpar.tracking.command_line import parse
from domainpar.tracking.config import InferConfig, PrepareConfig
from domainpar.tracking.config.group import ConfigError
from domainpar.tracking.events.store import EventStore


@pytest.mark.parametrize("config", [PrepareConfig, InferConfig])
def test_a_preset_sets_its_flags_and_nothing_else(config):
    usual = vars(parse(config, "", []))
    for name, flags in config.PRESETS.items():
        assert vars(parse(config, "", ["--preset", name])) == {**usual, "preset": name, **flags}
    assert set(PrepareConfig.PRESETS) == set(InferConfig.PRESETS)


def test_a_file_wins_over_a_preset_and_a_flag_over_both(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("hits: 5000\nvolumes: '8'\n")
    found = parse(PrepareConfig, "", ["--preset", "pixel", "--volumes", "9", "--config", str(path)])
    assert (found.hits, found.volumes, found.module_map) == (5000, "9", "build")
    path.write_text("preset: pixel\nhits: 5000\n")
    found = parse(PrepareConfig, "", ["--config", str(path)])
    assert (found.hits, found.volumes) == (5000, "7, 8, 9")


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="--preset"):
        parse(PrepareConfig, "", ["--preset", "pixels"])


def test_null_is_no_preset_also_where_a_shipped_network_has_one():
    assert parse(InferConfig, "", ["--run", "pretrained:pixel"]).preset == "pixel"
    assert parse(InferConfig, "", ["--run", "pretrained:pixel", "--preset", "null"]).preset is None


def test_presets_select_hits(tmp_path, capsys):
    size = ["--hits", "2000", "--events", "2", "--map-events", "3"]
    for preset in PrepareConfig.PRESETS:
        assert (
            prepare.main(["--preset", preset, *size, "--least-segments", "0", "--store", str(tmp_path / preset)]) == 0
        )
    assert capsys.readouterr().out.count("HARD CUTS BY TRUTH: {'pt': [1, inf]}") == 1
    volumes, noise = {}, {}
    for preset in PrepareConfig.PRESETS:
        events = EventStore(tmp_path / preset)
        with events.open(events.events()[0]) as event:
            rows = np.arange(event.num_nodes)
            volumes[preset] = set(event.read_nodes("volume", rows).tolist())
            noise[preset] = (event.read_nodes("particle_id", rows) == 0).sum()
    assert volumes["pixel"] == {7, 8, 9} < volumes["quickstart"] <= volumes["full"]
    assert noise["quickstart"] == 0 < noise["pixel"] < noise["full"]


def test_a_preset_that_names_the_target_of_a_map_takes_a_map_that_is_there():
    config = parse(PrepareConfig, "", ["--preset", "quickstart", "--module-map", "a.safetensors"])
    assert config.module_map == "a.safetensors"
    with pytest.raises(ConfigError, match="--map-target .*without --module-map build"):
        parse(PrepareConfig, "", ["--preset", "quickstart", "--module-map", "a", "--map-target", "pt: [2, .inf]"])


def test_cuts_are_as_wide_as_the_field_and_the_beam_spot_that_are_told(tmp_path):
    def cuts(*words):
        store = tmp_path / "-".join(words)
        assert prepare.main(["--events", "1", "--hits", "500", "--store", str(store), *words]) == 0
        settings = EventStore(store).settings
        return settings["phi_slope"], settings["z0"]

    assert cuts() == cuts("--field", "1", "--beam-spot", "0, 5") == (6e-4, 200.0)
    strong = cuts("--field", "3.8", "--beam-spot", "-10, 60")
    assert strong == pytest.approx((1.9 * 6e-4, 250.0))
    assert cuts("--field", "3.8", "--phi-slope", "5e-4") == (5e-4, 200.0)
