"""Where a run comes from: what `run.json` tells a bug report, and what it never tells."""

import os

import pytest

from domainpar import __version__
from domainpar.runs.origin import describe_process, environment_of_ranks, git_sha

SHA, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


def test_the_process_is_described_by_versions_command_and_machine():
    about = describe_process()
    assert about["versions"]["domainpar"] == __version__
    assert about["versions"]["torch"]
    assert about["pid"] == os.getpid()
    assert {"argv", "host", "machine", "started", "git", "environment"} <= set(about)


def test_the_environment_tells_how_ranks_were_started_and_no_secret():
    told = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "PMI_RANK": "0", "MASTER_ADDR": "node1", "RANK": "3"}
    secret = {"SLURM_JWT": "x", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "x", "MASTER_KEY": "x", "MY_RANK": "x"}
    assert environment_of_ranks(told | secret) == told


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    return tmp_path


def test_the_commit_is_that_of_the_branch(checkout):
    (checkout / ".git" / "refs" / "heads" / "main").write_text(f"{SHA}\n")
    assert git_sha(checkout) == SHA


def test_a_packed_branch_is_found(checkout):
    (checkout / ".git" / "packed-refs").write_text(f"# pack-refs\n{OTHER} refs/heads/main2\n{SHA} refs/heads/main\n")
    assert git_sha(checkout) == SHA


def test_a_commit_without_a_branch_is_found(checkout):
    (checkout / ".git" / "HEAD").write_text(f"{SHA}\n")
    assert git_sha(checkout) == SHA


def test_a_further_working_tree_is_followed_to_its_own_head_and_the_common_branches(checkout, tmp_path):
    (checkout / ".git" / "refs" / "heads" / "side").write_text(f"{SHA}\n")
    own = checkout / ".git" / "worktrees" / "side"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/side\n")
    (own / "commondir").write_text("../..\n")
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / ".git").write_text(f"gitdir: {own}\n")
    assert git_sha(tmp_path / "side") == SHA


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none", "ref:", "not a commit", "\udcff"])
def test_what_is_no_readable_checkout_has_no_commit(checkout, tmp_path, head):
    (checkout / ".git" / "HEAD").write_bytes(head.encode(errors="surrogateescape"))
    assert git_sha(checkout) is None
    assert git_sha(tmp_path / "nowhere") is None
