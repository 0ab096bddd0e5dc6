"""What commands say once for all ranks: of the memory they use, and of the values of the events that were prepared."""

import shutil
import sys

import pytest
from random_store import write_random_store
from test_infer import files_of

from domainpar import infer, prepare, train
from domainpar.parallel.allocator import set_up_allocator
from domainpar.testing import find_mpiexec, run_command

SMALL = "--hidden 16 --graph-iters 1 --max-steps 1".split()
SYSTEM = "allocator: the C library's own way (--allocator system)"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_train=1, num_val=0)


def begins(text, word):
    return [line for line in text.splitlines() if line.startswith(word)]


def run_of(store, out):
    assert train.main(["--store", str(store), "--out", str(out), *SMALL]) == 0
    return out


def test_both_commands_say_what_they_did_about_the_allocator(store, tmp_path, capsys):
    flags = ["--store", str(store), "--out", str(tmp_path / "run")]
    for more, said in (([], f"allocator: {set_up_allocator()}"), (["--allocator", "system"], SYSTEM)):
        assert train.main([*flags, "--overwrite", *SMALL, *more]) == 0
        assert begins(capsys.readouterr().out, "allocator") == [said]
        assert infer.main(["--run", str(tmp_path / "run"), "--overwrite", *more]) == 0
        assert begins(capsys.readouterr().out, "allocator") == [said]


def test_it_is_done_before_torch_is_imported(tmp_path):
    program = (
        "import sys; from domainpar import infer, train\n"
        "def seen(how): sys.exit(7 if 'torch' not in sys.modules else 8)\n"
        "train.set_up_allocator = infer.set_up_allocator = seen\n"
    )
    for command in ("train", "infer"):
        assert run_command([sys.executable, "-c", program + f"{command}.main([])"], 60)[0] == 7


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_ranks_say_it_once_import_nothing_of_torchs_compiler_and_score_the_newest_run_where_it_lies(
    store, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run_of(store, tmp_path / "another"), "runs/0001")
    program = (
        "import sys; from domainpar import infer, train\n"
        "code = train.main(sys.argv[1:])\n"
        "if {'torch._dynamo', 'sympy'} & set(sys.modules): sys.exit(7)\n"
        "print('and now', flush=True)\n"
        "sys.exit(code or infer.main(['--checkpoint', 'last']))"
    )
    flags = ["--store", str(store), *SMALL]
    code, text = run_command([find_mpiexec(), "-n", "2", sys.executable, "-c", program, *flags], 100)
    assert code == 0, text
    for said in (text.partition("and now")[0], text.rpartition("and now")[2]):
        assert len(begins(said, "allocator: ")) == 1
    assert len(begins(text.partition("and now")[0], "memory   : ")) == 2
    assert [path.parent.name for path in (tmp_path / "runs").glob("*/scores")] == ["0002"]
    found = files_of(tmp_path / "runs" / "0002" / "scores")
    assert infer.main(["--run", "runs/0002", "--checkpoint", "last", "--out", "runs/0002/one"]) == 0
    assert found == files_of(tmp_path / "runs" / "0002" / "one")
    assert len(found) == 2


def test_prepare_says_once_what_the_events_look_like_and_what_their_candidate_edges_hold(tmp_path, capsys):
    flags = ["--events", "3", "--hits", "1000", "--hit-inefficiency", "0.02", "--store", str(tmp_path / "store")]
    printed = []
    for _ in range(2):  # the second time the events are there already
        assert prepare.main(flags) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "hit inefficiency: 0.02 " in printed[0]
    for word in ("hits: radius 3", "hits per event, by volume: volume 7: ", "particles: ", "edges: ", "segments: "):
        assert len(begins(printed[0], word)) == 1
    assert begins(printed[0], "segments: ")[0].endswith(" candidate edges")
    assert begins(printed[0], "WARNING") == []
    assert all(len(line) <= 120 for line in printed[0].splitlines() if str(tmp_path) not in line)
    assert printed[0].splitlines()[-1].startswith("next: ")
