"""A batch script for Slurm. The run is on the job's first node, and the other nodes join its Ray cluster.

Before its time limit, the script saves and requeues the job, which then continues the run.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from rlflow.cluster.submit.joining import all_joined, within
from rlflow.cluster.submit.target import HEAD, TOKEN, LaunchTarget, quoted
from rlflow.errors import PlanError

SAVE_SECONDS = 300  # seconds before the time limit at which the run is asked to save
TIME = re.compile(r"\d+|\d+:\d{2}(:\d{2})?|\d+-\d{1,2}(:\d{2}){0,2}")
SEEDS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*(%[1-9]\d*)?")
RAY = '"127.0.0.1:$port"'
CHECKED = """\
set -e
if ! command -v rlflow > /dev/null; then
  echo 'there is no command rlflow: activate its environment before you run sbatch' >&2
  exit 1
fi
"""
# At a signal, bash returns from `wait` early, so a loop waits until the run has ended.
WAITED = """\
run=$! again=no code=0
trap 'again=yes; kill -TERM "$run" || true' USR1
trap 'kill -TERM "$run" || true' TERM INT
while kill -0 "$run" 2> /dev/null; do
  code=0
  wait "$run" || code=$?
done
if [ "$again" = yes ] && [ "$code" -eq 130 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
# Jobs may share a node, so each has its own port.
RAY_STARTED = """\
port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_AUTH_MODE=token
export {token}="${{{token}:-$(python -c 'import secrets; print(secrets.token_hex(32))')}}"
{start} --head --port="$port" --temp-dir="/tmp/ray-$SLURM_JOB_ID"
srun --nodes={others} --ntasks={others}{cpus} --exclude="$SLURMD_NODENAME" bash -c {joins} "$SLURMD_NODENAME:$port" &
{waits}
"""


def batch_script(target: LaunchTarget) -> str:
    """Return the script as text, for ``sbatch``.

    Raises PlanError for settings that a Slurm job can't have.
    """
    _check(target)
    head = ["#!/bin/bash", "# sbatch FILE, where FILE contains this text", *_directives(target)]
    secrets = [f': "${{{name}:?set it in the shell in which you run sbatch}}"' for name in _secrets(target)]
    ray = _ray(target) if target.apart else ""
    return "\n".join([*head, *secrets, f"{CHECKED}{ray}{_command(target)} &", WAITED])


def _directives(target: LaunchTarget) -> list[str]:
    settings = target.settings
    options = {
        "job-name": target.name,
        "output": f"{target.name}-%{'A_%a' if settings.seeds else 'j'}.out",
        "open-mode": "append",  # a requeued job continues its output
        "nodes": settings.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": settings.cpus,
        "gpus-per-node": settings.accelerators,
        "time": settings.time,
        "array": settings.seeds,
        "signal": f"B:USR1@{SAVE_SECONDS}",
    }
    named = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return [*named, "#SBATCH --requeue"]


def _command(target: LaunchTarget) -> str:
    """Return the run's command.

    The run's name stays the same after a requeue, and differs between jobs and seeds.
    """
    flags, given = dict(target.flags), target.flags.get("name")
    name = quoted(str(given or target.name)) + ("" if given else '-"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"')
    if target.settings.seeds:
        flags.pop("name", None)
        name += '-"$SLURM_ARRAY_TASK_ID"'
    seed = ' --seed "$SLURM_ARRAY_TASK_ID"' if target.settings.seeds else ""
    return replace(target, flags=flags).command({}, started=True, ray=RAY, name=name) + seed


def _secrets(target: LaunchTarget) -> list[str]:
    """Return the variables that the user must set. Normally, the script creates Ray's token itself."""
    return [name for name in target.secrets if name != TOKEN or name in target.settings.secret]


def _ray(target: LaunchTarget) -> str:
    """Return lines that start Ray on all of the job's nodes, and wait until they have joined."""
    start = 'ray start --num-cpus="$SLURM_CPUS_ON_NODE" --disable-usage-stats'
    return RAY_STARTED.format(
        token=TOKEN,
        start=start,
        others=target.settings.nodes - 1,
        # srun does not take this number from the job
        cpus=f" --cpus-per-task={target.settings.cpus}" if target.settings.cpus else "",
        # $0 is the first word after the script: the address of the Ray cluster
        joins=shlex.quote("\n".join(within(f'{start} --address="$0" --block', "no Ray to join"))),
        waits="\n".join(
            all_joined(target.settings.nodes, "sys.argv[1]", "not all nodes have joined the Ray", [RAY])
        ),
    )


def _check(target: LaunchTarget) -> None:
    """Raise PlanError if the seed is set twice, if there is an image, or if Slurm can't read a setting."""
    settings = target.settings
    checks = (
        (settings.time, TIME, "time", "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS", "1-12"),
        (settings.seeds, SEEDS, "seeds", "numbers and ranges of seeds", "0-4"),
    )
    for value, pattern, field, expected, example in checks:
        if value is not None and not pattern.fullmatch(value):
            raise PlanError.of(
                f"job-{field}",
                f"Slurm cannot read --{HEAD}.{field}",
                found=value,
                expected=expected,
                remedy=f"for example --{HEAD}.{field} {example}",
            )
    if settings.seeds and "seed" in target.flags:
        raise PlanError.of(
            "job-seeds",
            "two flags set the seed",
            found=f"--seed and --{HEAD}.seeds",
            expected="one of them",
            remedy="remove --seed",
        )
    if settings.image:
        raise PlanError.of(
            "job-image",
            "a Slurm job uses the environment of the shell in which you run sbatch",
            found=f"--{HEAD}.image",
            expected="no image",
            remedy=f"remove --{HEAD}.image, and activate rlflow's environment before you run sbatch",
        )
