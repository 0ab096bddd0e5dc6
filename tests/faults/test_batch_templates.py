"""The batch templates, run by bash with stand-ins for Slurm's commands and for the ranks."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from waiting import wait_until

LAUNCH = Path(__file__).parents[2] / "launch"
TEMPLATES = ["srun.sbatch", "mpiexec.sbatch"]

RANKS = """#!/bin/bash
# Stands in for srun or mpiexec, and for the ranks: works until it is asked to stop, then says how that went.
while [ "$1" != --out ]; do shift; done
mkdir -p "$2"
trap 'echo "{\\"state\\": \\"preempted\\"}" > '"$2"'/run.json; exit 0' USR1
echo '{"state": "running"}' > "$2/run.json"
touch started
[ "$HOW" = fail ] && exit 1
[ "$HOW" = done ] && { echo '{"state": "done"}' > "$2/run.json"; exit 0; }
for _ in $(seq 100); do sleep 0.1; done
exit 3
"""


@pytest.fixture
def job(tmp_path):
    """Starts a template in a folder of its own; returns the process."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("srun", "mpiexec"):
        (commands / name).write_text(RANKS)
    (commands / "scontrol").write_text('#!/bin/bash\necho "$@" >> requeued\n')
    for path in commands.iterdir():
        path.chmod(0o755)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("")
    environment = {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "VENV": str(tmp_path / "venv"),
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "2",
    }

    def start(template: str, how: str) -> subprocess.Popen[bytes]:
        command = ["bash", str(LAUNCH / template), "--epochs", "3"]
        return subprocess.Popen(command, cwd=tmp_path, env=environment | {"HOW": how}, start_new_session=True)

    return start


def wait_for(path: Path) -> None:
    wait_until(path.exists, 20)


@pytest.mark.parametrize("template", TEMPLATES)
def test_bash_understands_the_template(template):
    subprocess.run(["bash", "-n", str(LAUNCH / template)], check=True)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("how", "code"), [("done", 0), ("fail", 1)])
def test_a_job_that_is_done_or_failed_is_not_queued_again(job, tmp_path, template, how, code):
    assert job(template, how).wait(20) == code
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_job_whose_time_is_over_stops_with_a_checkpoint_and_is_queued_again(job, tmp_path, template):
    process = job(template, "work")
    wait_for(tmp_path / "started")
    if template == "srun.sbatch":  # Slurm signals the step's processes
        subprocess.run(["pkill", "-USR1", "-s", str(process.pid), "-f", "commands/srun"], check=True)
    else:  # Slurm signals the batch script
        os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(20) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_asks_for_what_the_signal_needs(template):
    lines = (LAUNCH / template).read_text().splitlines()
    wanted = {"srun.sbatch": "#SBATCH --signal=USR1@120", "mpiexec.sbatch": "#SBATCH --signal=B:USR1@120"}[template]
    assert any(line.startswith(wanted) for line in lines)
    for option in ("--requeue", "--open-mode=append"):
        assert any(line.startswith(f"#SBATCH {option}") for line in lines)
    assert any("--resume auto" in line for line in lines)
