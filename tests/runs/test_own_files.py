"""`--overwrite` removes files of ours and nothing else."""

import pytest

from domainpar.runs.own_files import remove, strangers_in_run, strangers_in_scores

FOLDERS = {
    strangers_in_run: ["checkpoints", "logs", "profile", "trackers", "faults", "scores"],
    strangers_in_scores: ["trainset", "valset_tracks", "unfinished"],
}


@pytest.mark.parametrize(("look", "name"), [(look, name) for look, names in FOLDERS.items() for name in names])
def test_a_folder_of_ours_is_known_and_a_link_to_a_folder_is_a_stranger(tmp_path, look, name):
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    (place / name).mkdir(parents=True)
    (place / "scores.json").touch()
    of_run = [place / "scores.json"] if look is strangers_in_run else []
    assert list(look(place)) == of_run
    (place / name).rename(elsewhere)
    (place / name).symlink_to(elsewhere)
    assert list(look(place)) == sorted([*of_run, place / name])


def test_of_a_link_the_link_is_removed_and_nothing_that_it_leads_to(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").touch()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "run.json").touch()
    (tmp_path / "ours" / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    assert remove([tmp_path / "link", tmp_path / "ours"]) == ["link", "ours/"]
    assert [path.name for path in tmp_path.rglob("*")] == ["theirs", "thesis.tex"]
