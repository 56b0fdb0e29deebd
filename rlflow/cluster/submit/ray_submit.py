"""A line for Ray's job server: the run on a Ray that is there already, with the folder in which the line is
typed."""

from __future__ import annotations

import json
import shlex

from rlflow.cluster.submit.target import SERVE_TOKEN, TOKEN, LaunchTarget


def submission(target: LaunchTarget) -> str:
    """The command, for a shell, which puts secrets in as it is typed. Services are started by the run itself,
    on the head's machine."""
    address = ["--address", shlex.quote(target.settings.address)] if target.settings.address else []
    # the command
    secrets = [
        name for name in target.secrets if name in target.settings.secret or name not in (TOKEN, SERVE_TOKEN)
    ]
    # reads Ray's token by itself, and services of the run listen on their machine alone
    words = [
        "ray job submit",
        *address,
        "--submission-id",
        f'"{target.name}-$(date +%s)"',
        "--working-dir .",
        *_environment(secrets),
    ]
    comments = "".join(f"# {line}\n" for line in target.warnings)
    return (
        comments
        + " ".join(
            [
                *words,
                "--",
                target.command({}, started=True) + ("" if _joins(target) else " --ray-address auto"),
            ]
        )
        + "\n"
    )


def _environment(secrets: list[str]) -> list[str]:
    """The secrets as the job's environment: their names stand here, and Python writes their values as
    JSON."""
    if not secrets:
        return []
    code = (
        f'import json, os; print(json.dumps({{"env_vars": {{name: os.environ[name] for name in '
        f"{json.dumps(secrets)}}}}}))"
    )
    return ["--runtime-env-json", f'"$(python3 -c {shlex.quote(code)})"']


def _joins(target: LaunchTarget) -> bool:
    """Whether the command of the run says already that it joins the Ray, or needs none."""
    return target.apart or "ray_address" in target.flags or not target.on_ray
