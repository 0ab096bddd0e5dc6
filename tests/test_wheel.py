"""The wheel that is built, in an environment that has its dependencies and nothing of this checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from domainpar.__main__ import COMMANDS, main
from domainpar.testing import find_mpiexec, patient

pytestmark = pytest.mark.slow
pytest.importorskip("build", reason="the package build is not installed (pip install '.[dev]')")
needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
WITHOUT_CHECKOUT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Source distribution and wheel, as they would be uploaded."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", out, ROOT], capture_output=True, text=True, timeout=patient(300)
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Where the programs of an environment with the wheel are; packages that it needs are those of the tests."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=patient(120))
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "-q", "--no-deps", built[0]]
    subprocess.run(pip, check=True, timeout=patient(120), env=WITHOUT_CHECKOUT)
    # A line in such a file is a folder to look in; that of an editable install there is not read.
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin"


def test_a_script_beside_a_folder_of_that_name_imports_the_package(tmp_path):
    (tmp_path / "domainpar").mkdir()  # a clone
    script = tmp_path / "own.py"
    script.write_text("import domainpar\nprint(domainpar.World)\n")
    words = [sys.executable, script]
    done = subprocess.run(words, env=WITHOUT_CHECKOUT, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr


def test_wheel_and_source_hold_what_they_promise(built):
    wheel, source = built
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("domainpar/py.typed", "partitioners/metis.py", "domainpar/tracking/pretrained/"):
        assert any(name.startswith(wanted) for name in names), wanted
    assert not [name for name in names if name.startswith(("tests/", "bench/", "stores/"))]
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "domainpar/train.py"} <= inside


@needs_mpi
def test_the_commands_work_where_the_wheel_alone_is(installed, tmp_path):
    environment = dict(WITHOUT_CHECKOUT)
    if libraries := sorted(Path(sys.prefix, "lib").glob("libmpi.so.*")):  # from a wheel, beside its packages
        environment["MPI4PY_LIBMPI"] = str(libraries[0])
    environment |= {"PATH": f"{installed}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def typed(*words):
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(300)
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    where = typed("python", "-c", "import domainpar, partitioners; print(domainpar.__file__, partitioners.__file__)")
    assert all(Path(path).is_relative_to(installed.parent) for path in where.split())
    typed("domainpar", "prepare", "--hits", "1500", "--events", "3", "--store", "store")
    on_two = typed("mpiexec", "-n", "2", "domainpar", "train", "--store", "store", "--epochs", "2", "--out", "two")
    assert "2 ranks over mpi" in on_two
    typed("python", "-m", "domainpar.train", "--store", "store", "--epochs", "2", "--out", "one")
    hashes = [json.loads((tmp_path / run / "run.json").read_text())["parameters_sha256"] for run in ("one", "two")]
    assert hashes[0] == hashes[1]
    typed("domainpar", "infer", "--run", "one", "--tracks", "greedy")
    typed("domainpar", "report", "one")
    assert (tmp_path / "one" / "report.html").stat().st_size > 100_000


def test_the_command_tells_its_commands_and_what_is_none(capsys):
    assert main(["--help"]) == main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)
    assert main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("domainpar 0.")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0
