"""The script of `rlflow job --for slurm`: its directives, its shell, and what it does, with stand-ins only for the
commands of Slurm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from started import until

from rlflow.checkpoints.reading import load_latest
from rlflow.cli.job import print_job

SCRIPTS = sorted((Path(__file__).parent / "golden").glob("*.slurm.txt"))
# the options of sbatch(1) that the scripts use → the form of their values
OPTIONS = {
    "job-name": r"[\w.-]+",
    "output": r"[\w.-]+(%[AajxN][\w.]*)+",
    "open-mode": "append|truncate",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "gpus-per-node": r"([\w.-]+:)?\d+",
    "time": r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}",
    "array": r"\d+(-\d+)?(,\d+(-\d+)?)*(%\d+)?",
    "signal": r"B:[A-Z0-9]+@\d+",
    "requeue": "",
}
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_directives_are_options_of_sbatch_before_the_first_command(script):
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert directives == [line for line in lines[:first] if line.startswith("#SBATCH")]
    for line in directives:
        name, value = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line).groups()
        assert re.fullmatch(OPTIONS[name], value or ""), line


def test_shellcheck_accepts_the_scripts():
    # $0 and $SECONDS are meant for the shell that srun starts
    subprocess.run([SHELLCHECK, "--exclude=SC2016", *SCRIPTS], check=True)


def stand_ins(folder, **scripts):
    """Write commands of Slurm into a folder that is searched first; return the environment of a job's first
    node."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURMD_NODENAME": "127.0.0.1",
    }


def script(capsys, tmp_path, *flags):
    """Write the script of a run on the null backend, and return its path."""
    words = ["--backend", "null", "--prompts", "4", "--held-out", "0", "--job.keep", str(tmp_path), *flags]
    assert print_job("grpo", ["--for", "slurm", *words]) == 0
    (path := tmp_path / "job.sh").write_text(capsys.readouterr().out)
    return path


def iterations(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
def test_a_job_near_its_time_limit_saves_and_its_requeued_job_continues(capsys, tmp_path):
    job = script(capsys, tmp_path, "--iterations", "1000", "--generate_seconds", "0.05")
    environment = stand_ins(tmp_path, scontrol=f'echo "$@" >> {tmp_path}/requeued')
    run = tmp_path / "grpo-7"
    first = subprocess.Popen(["bash", job], env=environment, stdout=subprocess.DEVNULL)
    try:
        assert until(lambda: iterations(run) > 2, 240)
        first.send_signal(signal.SIGUSR1)
        assert first.wait(240) == 130
    finally:
        first.kill()
    saved = load_latest(run).snapshot.iteration
    assert saved == iterations(run) > 2
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    job.write_text(job.read_text().replace("--iterations 1000", f"--iterations {saved + 1}"))
    again = subprocess.run(["bash", job], env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"resuming from step-{saved:08}" in again.stdout + again.stderr
    assert iterations(run) == saved + 1
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


@pytest.mark.slow
def test_a_cancelled_job_saves_and_is_not_requeued(capsys, tmp_path):
    job = script(capsys, tmp_path, "--iterations", "1000", "--generate_seconds", "0.05", "--job.seeds", "3-4")
    environment = stand_ins(tmp_path, scontrol=f"touch {tmp_path}/requeued")
    run = tmp_path / "grpo-6-3"
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"}
    process = subprocess.Popen(["bash", job], env=environment | array, stdout=subprocess.DEVNULL)
    try:
        assert until(lambda: iterations(run) > 1, 240)
        process.terminate()
        assert process.wait(240) == 130
    finally:
        process.kill()
    assert load_latest(run).snapshot.iteration == iterations(run)
    assert json.loads((run / "settings.json").read_text())["options"]["seed"] == 3
    assert not (tmp_path / "requeued").exists()


def test_a_job_without_rlflow_or_a_secret_ends_before_it_starts_anything(capsys, tmp_path):
    assert print_job("grpo", ["--for", "slurm", "--job.secret", "HF_TOKEN"]) == 0
    (path := tmp_path / "job.sh").write_text(capsys.readouterr().out)
    bash = shutil.which("bash")
    for environment, said in (
        ({"PATH": str(tmp_path)}, "HF_TOKEN: set it in the shell"),
        ({"PATH": str(tmp_path), "HF_TOKEN": "x"}, "activate its environment"),
    ):
        ended = subprocess.run([bash, path], env=environment, capture_output=True, text=True)
        assert (ended.returncode != 0, said in ended.stderr) == (True, True), ended.stderr


@pytest.mark.long
def test_the_nodes_of_a_job_join_one_ray(capsys, tmp_path):
    """The second node is a second Ray node on this machine. srun's stand-in runs the command that it is given."""
    job = script(capsys, tmp_path, "--iterations", "2", "--pools", "all=3", "--job.nodes", "2")
    environment = stand_ins(tmp_path, srun='while [[ $1 == --* ]]; do shift; done; exec "$@"')
    number = str(os.getpid())
    environment |= {"SLURM_JOB_ID": number}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            ["bash", job], env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        assert process.wait(400) == 0, (tmp_path / "said").read_text()
    finally:
        subprocess.run(["pkill", "-f", f"ray-{number}"])  # what Slurm does to a job that has ended
        os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(f"/tmp/ray-{number}", ignore_errors=True)
    assert iterations(tmp_path / f"grpo-{number}") == 2
