"""The TrackML reader: what the files say, or an error that names event, file and columns."""

from __future__ import annotations

import gzip
import shutil
from functools import partial

import numpy as np
import pytest
import source_files
from marks import fault
from refused import refused

from domainpar.common.problems import Problem

names_in, paths_of, read_event = (
    partial(call, "trackml") for call in (source_files.names_in, source_files.paths_of, source_files.read_event)
)

HITS = """hit_id,x,y,z,volume_id,layer_id,module_id
1,-69.5,-0.8,-1502.5,7,2,1
2,30.0,40.0,12.5,8,2,101
5,3.0,-4.0,0.0,8,4,7
"""
TRUTH = """hit_id,particle_id,weight
5,0,0.0
1,4503668346847232,0.25
2,4503668346847233,0.75
"""
PARTICLES = """particle_id,vx,vy,vz,px,py,pz,q,nhits
4503668346847232,0.1,0.2,-6.5,3.0,4.0,0.0,-1,11
4503668346847240,0.0,0.0,1.0,0.0,0.0,2.0,1,3
"""


@pytest.fixture
def event(tmp_path):
    write(tmp_path, hits=HITS, truth=TRUTH, particles=PARTICLES)
    return tmp_path


def write(directory, suffix=".csv", **parts):
    for part, text in parts.items():
        path = directory / f"event000000042-{part}{suffix}"
        if suffix.endswith(".gz"):
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)


def test_hits_keep_the_order_of_the_file_and_truth_is_matched_by_hit_id(event):
    hits = read_event(event, "000000042")
    assert hits.hit_id.tolist() == [1, 2, 5]
    assert hits.position.tolist() == [[-69.5, np.float32(-0.8), -1502.5], [30, 40, 12.5], [3, -4, 0]]
    assert (hits.volume.tolist(), hits.layer.tolist(), hits.module.tolist()) == ([7, 8, 8], [2, 2, 4], [1, 101, 7])
    assert hits.particle_id.tolist() == [4503668346847232, 4503668346847233, 0]
    assert hits.weight.tolist() == [0.25, 0.75, 0]
    assert hits.event_id == "000000042"


def test_particles_give_pt_eta_vertex_charge_and_nhits(event):
    particles = read_event(event, "000000042").particles
    assert particles.particle_id[:2].tolist() == [4503668346847232, 4503668346847240]
    assert particles.pt[0] == 5
    assert particles.eta[0] == 0
    assert particles.vertex[0].tolist() == [np.float32(0.1), np.float32(0.2), -6.5]
    assert (particles.nhits[:2].tolist(), particles.charge[:2].tolist()) == ([11, 3], [-1, 1])
    assert np.isnan(particles.eta[1]), "without transverse momentum there is no pseudorapidity"


def test_a_particle_with_hits_that_the_table_does_not_list_is_appended_as_unknown(event):
    particles = read_event(event, "000000042").particles
    assert particles.particle_id[2] == 4503668346847233
    assert (particles.nhits[2], particles.charge[2]) == (1, 0)
    assert np.isnan([particles.pt[2], particles.eta[2], *particles.vertex[2]]).all()


def test_gzipped_files_read_the_same(event, tmp_path_factory):
    other = tmp_path_factory.mktemp("gz")
    write(other, ".csv.gz", hits=HITS, truth=TRUTH, particles=PARTICLES)
    plain, packed = read_event(event, "000000042"), read_event(other, "000000042")
    assert plain.hit_id.tolist() == packed.hit_id.tolist()
    assert plain.particles.pt.tolist() == pytest.approx(packed.particles.pt.tolist(), nan_ok=True)


def test_truth_needs_only_two_columns_and_particles_only_one(tmp_path):
    write(tmp_path, hits=HITS, truth="hit_id,particle_id\n1,7\n2,7\n5,0\n", particles="particle_id\n7\n")
    hits = read_event(tmp_path, "000000042")
    assert hits.weight is None
    assert (hits.particles.nhits.tolist(), hits.particles.charge.tolist()) == ([2], [0])
    assert np.isnan(hits.particles.pt).all()


def test_events_without_truth_or_particles_are_read(tmp_path):
    write(tmp_path, hits=HITS)
    hits = read_event(tmp_path, "000000042")
    assert (hits.particle_id, hits.weight, hits.particles) == (None, None, None)


def test_a_first_column_of_row_numbers_without_a_name_is_left_alone(tmp_path):
    numbered = "\n".join(f"{'' if i == 0 else i - 1},{line}" for i, line in enumerate(HITS.splitlines()))
    write(tmp_path, hits=numbered)
    assert read_event(tmp_path, "000000042").hit_id.tolist() == [1, 2, 5]


def test_blanks_around_names_of_columns_are_no_part_of_them(event):
    write(event, hits=HITS.replace("y,z", " y , z"))
    assert read_event(event, "000000042").position[1].tolist() == [30, 40, 12.5]


def test_an_event_without_hits_is_an_event(tmp_path):
    write(tmp_path, hits=HITS.splitlines()[0] + "\n", truth="hit_id,particle_id\n")
    assert len(read_event(tmp_path, "000000042")) == 0


def test_events_of_a_directory_are_listed_sorted(event):
    (event / "event7-hits.csv.gz").write_bytes(b"")
    (event / "detectors.csv").write_text("")
    assert names_in(event) == ["000000042", "7"]
    assert [path.name for path in paths_of(event, "000000042")] == [
        f"event000000042-{part}.csv" for part in ("hits", "truth", "particles")
    ]


def test_directories_without_events_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no TrackML events"):
        names_in(tmp_path)
    with pytest.raises(ValueError, match="not a directory"):
        names_in(tmp_path / "nowhere")
    with refused("^no hits in", "9"):
        read_event(tmp_path, "9")


def test_events_one_folder_down_are_named_with_their_folder(event, tmp_path):
    shutil.copytree(event, tmp_path / "outer" / "train_1")
    (tmp_path / "outer" / "notes").mkdir()
    with pytest.raises(Problem) as found:
        names_in(tmp_path / "outer")
    assert found.value.hint.endswith(f"--input {tmp_path / 'outer' / 'train_1'}")


def test_truth_whose_hits_have_other_numbers_is_named_and_a_part_without_truth_is_not(tmp_path):
    for hits, truth in ((0, 1000), (1, 1001)):
        (tmp_path / f"event{hits}-hits.csv").write_text(HITS)
        (tmp_path / f"event{truth}-truth.csv").write_text("hit_id,particle_id\n")
    with pytest.raises(Problem, match=r"2 events of .* no truth \(0, 1\), .* truth of 2 events without .*1000, 1001"):
        names_in(tmp_path)
    for truth in (1000, 1001):
        (tmp_path / f"event{truth}-truth.csv").unlink()
    (tmp_path / "event1-truth.csv").write_text("")
    assert names_in(tmp_path) == ["0", "1"]


@fault(22)
@pytest.mark.parametrize(
    ("part", "text", "message"),
    [
        ("hits", "", "cannot be read, EmptyDataError"),
        ("hits", HITS.replace("layer_id", "layer"), r"no column layer_id; found \['hit_id', .*'layer', .*expected"),
        ("hits", HITS.replace("5,3.0", "2,3.0"), r"hit_id appear more than once, the first is 2 in rows \[1, 2\]"),
        ("hits", HITS.replace("40.0", "nan"), "column y holds 1 values that are no finite numbers.* in row 1"),
        ("hits", HITS.replace("40.0", "inf"), "column y holds 1 values .*inf in row 1"),
        ("hits", HITS.replace("40.0", "forty"), "column y holds .*: forty in row 1"),
        (
            "hits",
            HITS.replace(",8,4,7", ""),
            "row 2 has 4 fields, and the first line has 7 .1 such rows.; is it truncated",
        ),
        ("hits", HITS.replace("8,2,101", "8,2,101,1"), "row 1 has 8 fields, and the first line has 7"),
        ("hits", HITS.replace("8,4,7", "8,4,"), "column module_id holds 1 .*: empty in row 2"),
        ("hits", HITS.replace("5,3.0,-4.0,0.0,8,4,7\n", ""), "1 rows name no such hit .first: hit_id 5"),
        ("truth", TRUTH.replace("5,0,0.0\n", ""), "1 of the 3 hits in event000000042-hits.csv have no row here"),
        ("truth", TRUTH.replace("particle_id", "pid"), "no column particle_id"),
        ("truth", TRUTH.replace("5,0,0.0", "1,0,0.0"), " 1 in rows"),
        ("truth", TRUTH.replace("0.25", ""), "weight holds 1"),
        ("particles", PARTICLES.replace("particle_id", "id"), "no column particle_id"),
        ("particles", PARTICLES.replace("7240", "7232"), "particle_id .*more than once"),
        ("particles", PARTICLES.replace("4503668346847240", "0"), "particle 0"),
        ("particles", PARTICLES.replace("4.0,0.0,-1", "inf,0.0,-1"), "py holds 1"),
    ],
)
def test_bad_files_are_refused_with_event_and_file(event, part, text, message):
    write(event, **{part: text})
    faulty = "truth" if message.startswith("1 rows ") else part
    with refused(message, "000000042", event / f"event000000042-{faulty}.csv"):
        read_event(event, "000000042")


FIVE = "particle_id_pv,particle_id_sv,particle_id_part,particle_id_gen,particle_id_subpart"
OF_ACTS = {
    "hits since version 44": ("hits", f"{FIVE},geometry_id,tx,ty,tz,tt,tpx,tpy,tpz,te,index"),
    "hits before, and of traccc": ("hits", "particle_id,geometry_id,tx,ty,tz,tt,tpx,tpy,tpz,te,deltapx,index"),
    "space points": ("hits", "measurement_id,geometry_id,x,y,z,var_r,var_z"),
    "particles": ("particles", f"{FIVE},particle_type,process,vx,vy,vz,vt,px,py,pz,m,q"),
    "cells": ("cells", "geometry_id,hit_id,channel0,channel1,timestamp,value"),
}


@pytest.mark.parametrize("name", OF_ACTS)
def test_csv_of_acts_is_called_that_with_what_to_do(tmp_path, name):
    part, columns = OF_ACTS[name]
    write(tmp_path, **{"hits": HITS, part: f"{columns}\n"})
    (tmp_path / "detectors.csv").write_text("volume_id\n")
    with pytest.raises(Problem) as refused:
        read_event(tmp_path, "000000042", cluster_features=part == "cells")
    assert f"{part} of ACTS" in str(refused.value)
    assert "--source acts" in refused.value.hint
    assert refused.value.file == str(tmp_path / f"event000000042-{part}.csv")


@pytest.mark.parametrize("part", ["measurements", "measurement-simhit-map", "spacepoints"])
def test_a_directory_of_acts_without_hits_is_called_that(tmp_path, part):
    (tmp_path / f"event000000000-{part}.csv").write_text("measurement_id,geometry_id\n")
    with pytest.raises(Problem, match="--source acts"):
        names_in(tmp_path)


HINTS = {
    "another separator": (HITS.replace(",", ";").encode(), ".csv", "separated by ';' here; write commas"),
    "tabs": (HITS.replace(",", "\t").encode(), ".csv", "separated by tabs here; write commas"),
    "decimal commas": (
        HITS.replace(",", ";").replace(".", ",").encode(),
        ".csv",
        "write commas between them, and deci",
    ),
    "thousands": (HITS.replace("-1502.5", '"-1,502.5"').encode(), ".csv", "thousands without a comma"),
    "capitals": (HITS.replace("hit_id", "HIT_ID").encode(), ".csv", "small letters: hit_id for HIT_ID"),
    "a comment at the end": (HITS.encode() + b"# end\n", ".csv", "it is a comment: remove it"),
    "Latin-1": (
        HITS.replace("module_id", "module_id,n\u00e9").encode("latin-1"),
        ".csv",
        "iconv -f LATIN1 -t UTF-8 event000000042-hits.csv",
    ),
    "infinite": (
        HITS.replace("12.5", "inf").encode(),
        ".csv",
        "write a number, or remove the row: of a hit in all files",
    ),
    "half a layer": (HITS.replace("8,4,7", "8,4.5,7").encode(), ".csv", "make decimal numbers"),
    "a volume of 36 bits": (
        HITS.replace(",8,", f",{2**35 + 8},").encode(),
        ".csv",
        "expected are -2147483648 to 2147483647",
    ),
    "a comment": (b"# made by me\n" + HITS.encode(), ".csv", "the first line is a comment: remove it"),
    "nothing": (b"", ".csv", "the file is empty"),
    "nothing, gzipped": (b"", ".csv.gz", "the file is empty"),
    "UTF-16": (HITS.encode("utf-16"), ".csv", "iconv -f UTF-16 -t UTF-8 event000000042-hits.csv"),
    "gzipped and named plain": (gzip.compress(HITS.encode()), ".csv", "is gzipped"),
    "plain and named gzipped": (HITS.encode(), ".csv.gz", "not gzipped"),
    "truncated": (gzip.compress(HITS.encode())[:-12], ".csv.gz", "truncated"),
}


@pytest.mark.parametrize(("content", "suffix", "hint"), HINTS.values(), ids=HINTS)
def test_a_file_that_is_no_csv_is_refused_with_what_its_first_bytes_say(tmp_path, content, suffix, hint):
    (tmp_path / f"event000000042-hits{suffix}").write_bytes(content)
    with pytest.raises(Problem) as error:
        read_event(tmp_path, "000000042")
    assert hint in error.value.hint


TRUTH_HINTS = {
    "noise -1": (TRUTH.replace("5,0,", "5,-1,"), "hits of noise have particle_id 0"),
    "noise empty": (TRUTH.replace("5,0,", "5,,"), "hits of noise have particle_id 0"),
    "floats that lost digits": (TRUTH.replace("4503668346847233", "9007199254740994.0"), "decimal numbers lose digits"),
    "six digits": (TRUTH.replace("4503668346847233", "4.50367e+15"), "make decimal numbers of whole ones"),
    "points without a hit": (TRUTH + "9,7,0.0\n", "remove their rows from truth"),
    "none of the particles": (TRUTH.replace("45036", "36"), "numbered anew in one of them"),
}


@pytest.mark.parametrize("name", TRUTH_HINTS)
def test_truth_that_particles_or_hits_contradict_is_refused_with_what_to_do(event, name):
    text, hint = TRUTH_HINTS[name]
    write(event, truth=text)
    with pytest.raises(Problem) as error:
        read_event(event, "000000042")
    assert hint in error.value.hint


def test_ids_as_floats_are_read_where_a_float_holds_them(event):
    floats = TRUTH.replace(",0,", ",0.0,").replace("6847232", "6847232.0").replace("6847233", "6847233.0")
    write(event, truth=floats)
    assert read_event(event, "000000042").particle_id.tolist() == [4503668346847232, 4503668346847233, 0]


def test_a_text_with_a_comma_is_one_field(event):
    named = PARTICLES.replace("\n", ',"pt, eta"\n').replace('"pt, eta"', "process", 1)
    write(event, particles=named)
    assert read_event(event, "000000042").particles.nhits.tolist() == [11, 3, 1]


def test_modules_of_64_bits_stay_apart_and_in_order(event):
    big = 2**40
    write(event, hits=HITS.replace("2,1\n", f"2,{7 * big}\n").replace("2,101", f"2,{-3 * big}").replace("4,7", "4,0"))
    assert read_event(event, "000000042").module.tolist() == [1, -1, 0]


def test_a_file_that_is_there_plain_and_gzipped_is_refused(event):
    write(event, ".csv.gz", truth=TRUTH)
    twice = "truth .*event000000042-truth.csv .*event000000042-truth.csv.gz"
    with refused(twice, "000000042", event / "event000000042-truth.csv"):
        read_event(event, "000000042")


def test_a_particle_0_comes_with_what_to_do_about_it(event):
    write(event, particles=PARTICLES.replace("4503668346847240", "0"))
    with pytest.raises(Problem) as error:
        read_event(event, "000000042")
    assert "add 1 to every particle_id" in error.value.hint
    (event / "event000000042-truth.csv").unlink()
    with pytest.raises(Problem) as error:
        read_event(event, "000000042")
    assert "remove this file" in error.value.hint


@pytest.mark.parametrize("size", [0, 20, -12])
def test_truncated_gzip_files_are_refused(tmp_path, size):
    write(tmp_path, ".csv.gz", hits=HITS)
    path = tmp_path / "event000000042-hits.csv.gz"
    path.write_bytes(path.read_bytes()[:size])
    with refused("^cannot be read", "000000042", path):
        read_event(tmp_path, "000000042")


@pytest.mark.parametrize("big", [864691128455135233, 2**63 + 1])  # above 2^53: a float would change it
def test_big_particle_ids_keep_every_digit(tmp_path, big):
    write(tmp_path, hits=HITS, truth=f"hit_id,particle_id\n1,{big}\n2,0\n5,{big}\n")
    assert read_event(tmp_path, "000000042").particle_id.view(np.uint64).tolist() == [big, 0, big]
