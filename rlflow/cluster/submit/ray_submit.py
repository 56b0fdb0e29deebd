"""A shell command that submits a run to the job server of an existing Ray, from the current folder."""

from __future__ import annotations

import json
import shlex

from rlflow.cluster.submit.target import SERVE_TOKEN, TOKEN, LaunchTarget


def submission(target: LaunchTarget) -> str:
    """Return the shell command that submits the run. The shell fills in the values of secrets.

    The run starts its services itself, on the machine of Ray's head.
    """
    address = ["--address", shlex.quote(target.settings.address)] if target.settings.address else []
    # Ray's job client reads Ray's token by itself, and the run's services listen only on their own machine,
    # so these two tokens are only passed if the user names them
    secrets = [
        name for name in target.secrets if name in target.settings.secret or name not in (TOKEN, SERVE_TOKEN)
    ]
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
                target.command({}, started=True, ray="auto")
                + ("" if _joins(target) else " --ray-address auto"),
            ]
        )
        + "\n"
    )


def _environment(secrets: list[str]) -> list[str]:
    """Return the shell option that passes secrets to the job as environment variables.

    The option contains only their names. It runs a Python command that writes their values as JSON.
    """
    if not secrets:
        return []
    code = (
        f'import json, os; print(json.dumps({{"env_vars": {{name: os.environ[name] for name in '
        f"{json.dumps(secrets)}}}}}))"
    )
    return ["--runtime-env-json", f'"$(python3 -c {shlex.quote(code)})"']


def _joins(target: LaunchTarget) -> bool:
    """Return whether the run's command already joins the Ray cluster, or doesn't need Ray."""
    return target.apart or "ray_address" in target.flags or not target.on_ray
