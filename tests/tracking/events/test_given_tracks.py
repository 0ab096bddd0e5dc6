"""Files of tracks of others: each form is read as its writer meant it, what is damaged is refused by name."""

import gzip

import numpy as np
import pandas as pd
import pytest

from domainpar.common.problems import Problem
from domainpar.tracking.events.given_tracks import plain_name, read_tracks, rows_of

TABLE = "event_id,hit_id,track_id\n7,10,3\n7,11,3\n7,11,4\n8,10,-1\n"
ACTS = (
    "track_id,seed_id,nMeasurements,pT,Measurements_ID\n"
    '26,100,3,1.1,"[22,21,5,]"\n'
    '9,101,2,0.9,"[21,1]"\n'
    '12,102,0,0.9,"[]"\n'
)


def found(path):
    return {
        event: (given.hit.tolist(), given.track.tolist(), given.of_acts) for event, given in read_tracks(path).items()
    }


def test_a_table_is_read_from_csv_gzip_and_parquet_by_either_name_of_its_columns(tmp_path):
    expected = {"7": ([10, 11, 11], [3, 3, 4], False), "8": ([10], [-1], False)}
    (tmp_path / "plain.csv").write_text(TABLE)
    (tmp_path / "short.csv").write_text(TABLE.replace("event_id", "event").replace("track_id", "track"))
    (tmp_path / "zeros.csv").write_text(TABLE.replace("\n7,", "\n000000007,"))
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    pd.read_csv(tmp_path / "plain.csv").to_parquet(tmp_path / "table.parquet")
    for path in tmp_path.iterdir():
        assert found(str(path)) == expected, path.name


def test_a_folder_of_files_an_event_each_is_read_with_those_that_have_no_track(tmp_path):
    (tmp_path / "event000000003-tracks.csv").write_text("hit_id,track_id\n1,0\n2,0\n")
    (tmp_path / "event000000004-tracks.csv").write_text("event_id,hit_id,track_id\n")
    (tmp_path / "event000000003-hits.csv").write_text("not,tracks\n")
    assert found(str(tmp_path)) == {"3": ([1, 2], [0, 0], False), "4": ([], [], False)}


def test_tracks_of_acts_are_lists_of_measurements_a_track_a_row(tmp_path):
    for kind in ("ambi", "ckf"):
        (tmp_path / f"event000000007-tracks_{kind}.csv").write_text(ACTS)
    with pytest.raises(Problem, match=r"event\*-tracks_ambi.csv and event\*-tracks_ckf.csv\nhint: "):
        read_tracks(str(tmp_path))
    assert found(f"{tmp_path}/event*-tracks_ambi.csv") == {"7": ([22, 21, 5, 21, 1], [0, 0, 0, 1, 1], True)}


def test_lists_of_acorn_and_of_colliderml_are_read(tmp_path):
    (tmp_path / "event000000007.txt").write_text("5 6 7\n6 9\n")
    assert found(str(tmp_path)) == {"7": ([5, 6, 7, 6, 9], [0, 0, 0, 1, 1], False)}
    lists = {"event_id": [7, 90], "hit_ids": [[[5, 6, 7], [6, 9]], []], "track_id": [[4, 2], []]}
    pd.DataFrame(lists).to_parquet(tmp_path / "tracks.parquet")
    for folder in ("sample/ttbar_pu200_tracks", "sample/ttbar_pu200_tracker_hits"):
        (tmp_path / folder).mkdir(parents=True)
        pd.DataFrame(lists if folder.endswith("tracks") else {"x": [1.0]}).to_parquet(tmp_path / folder / "0.parquet")
    for whole in ("sample/ttbar_pu200_tracks", "sample"):
        assert list(found(f"{tmp_path}/{whole}")) == ["7", "90"]
    assert found(f"{tmp_path}/tracks.parquet") == {
        "7": ([5, 6, 7, 6, 9], [0, 0, 0, 1, 1], False),
        "90": ([], [], False),
    }


DAMAGED = {
    "no.csv": (None, "no such file"),
    "empty.csv": ("", "cannot be read, EmptyDataError"),
    "cut.csv": (TABLE[:-4], "track_id is nan in row 3"),
    "text.csv": (TABLE.replace("11,4", "x,4"), "hit_id is x in row 2"),
    "half.csv": (TABLE.replace("11,4", "11,4.5"), "track_id is 4.5 in row 2"),
    "other.csv": ("a,b\n1,2\n", "no column hit_id; found a, b"),
    "nameless.csv": ("hit_id,track_id\n1,2\n", "no column event or event_id; found hit_id, track_id"),
    "event1-tracks_x.csv": (ACTS.replace("[21,1]", "21;1"), "track 1 .*'21;1'"),
    "event1-tracks_y.csv": (ACTS.replace('"[21,1]"', ""), "track 1 .*'nan'"),
    "fake.parquet": (TABLE, "cannot be read"),
    "fake.csv.gz": (TABLE, "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_refused_with_its_file(tmp_path, name):
    content, what = DAMAGED[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(Problem, match=what) as refused:
        read_tracks(str(tmp_path / name))
    assert name in str(refused.value)
    assert refused.value.hint


def test_an_event_in_two_files_is_refused(tmp_path):
    for name in ("event7-tracks.csv", "event007-tracks.csv"):
        (tmp_path / name).write_text("hit_id,track_id\n1,0\n")
    with pytest.raises(Problem, match="has tracks of this event, too"):
        read_tracks(str(tmp_path))


def test_names_and_rows_are_found_again():
    assert [plain_name(name) for name in ("000000007", "0", "000", "sim7", "07a")] == ["7", "0", "0", "sim7", "07a"]
    hit_id = np.array([30, 10, 20])
    assert rows_of(np.array([10, 30, 30]), hit_id).tolist() == [1, 0, 0]
