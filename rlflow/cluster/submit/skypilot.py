"""A SkyPilot job group. The run is the primary task; its other machines and its services are further tasks.

These end after the primary task. SkyPilot makes each task reachable as the host
``NAME-0.${SKYPILOT_JOBGROUP_NAME}``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlflow.cluster.submit.documents import joined
from rlflow.cluster.submit.joining import all_joined, within
from rlflow.cluster.submit.keeping import MOUNT
from rlflow.cluster.submit.target import GROUP, HEAD, RAY_HERE, RAY_PORT, TOKEN, LaunchTarget, quoted
from rlflow.errors import PlanError
from rlflow.processes.declare import PORT, Service

MAIN, WORKERS = "run", "workers"
SETUP = "pip install 'rlflow-dag[{extras}]'"


def job_group(target: LaunchTarget) -> str:
    """Return the job group as YAML, for ``sky jobs launch``.

    Raises PlanError if a service needs GPUs but the kind of GPU isn't given.
    """
    _check_gpus(target)
    urls = {service.name: f"http://{task_of(service)}-0.{GROUP}:{port}" for service, port in target.own}
    delays = {task_of(service): f"{math.ceil(service.delay)}s" for service, _ in target.own}
    header: dict[str, Any] = {
        "name": target.name,
        "execution": "parallel",
        "primary_tasks": [MAIN],
        "termination_delay": {"default": "0s", **delays},
    }
    tasks = [_main(target, urls), *([_workers(target)] if target.apart else [])]
    tasks += [_service(target, service, port, urls) for service, port in target.own]
    secrets = "".join(f" --secret {name}" for name in target.secrets)
    return joined(
        [f"sky jobs launch{secrets} FILE, where FILE contains this text", *target.warnings], [header, *tasks]
    )


def task_of(service: Service) -> str:
    """Return the name of a service's task, in a form that can be part of a host name."""
    return service.name.replace("_", "-").lower()


def _task(
    target: LaunchTarget, name: str, run: Sequence[str], extras: str, nodes: int = 1, **resources: Any
) -> dict[str, Any]:
    image = {"image_id": f"docker:{target.settings.image}"} if target.settings.image else {}
    needs = {key: value for key, value in resources.items() if value} | image
    return {
        "name": name,
        "num_nodes": nodes,
        **({"resources": needs} if needs else {}),
        "workdir": ".",
        **({"secrets": dict.fromkeys(target.secrets)} if target.secrets else {}),
        **({} if target.settings.image else {"setup": SETUP.format(extras=extras)}),
        "run": "\n".join(["set -e", *run]) + "\n",
    }


def _machine(target: LaunchTarget) -> dict[str, Any]:
    return {
        "accelerators": target.settings.accelerators,
        "cpus": f"{target.settings.cpus}+" if target.settings.cpus else None,
    }


def _kept(target: LaunchTarget) -> dict[str, Any]:
    """Return the file mounts that keep the run's folder."""
    keep = target.keep
    if keep is None or keep.kind == "path":
        return {}
    if keep.kind == "claim":
        return {"volumes": {MOUNT: keep.name}}
    return {"file_mounts": {MOUNT: {"source": keep.name, "mode": "MOUNT_CACHED"}}}


def _main(target: LaunchTarget, urls: dict[str, str]) -> dict[str, Any]:
    exports = [
        f"export {service.variable}={quoted(urls.get(service.name, service.run))}"
        for service in target.services
    ]
    ray = [
        f"export RAY_AUTH_MODE=token  # {TOKEN} is a secret of the job",
        f"ray start --head --port={RAY_PORT} --disable-usage-stats",
    ]
    run = [
        *exports,
        *(ray if target.apart else []),
        *(
            all_joined(target.settings.nodes, f'"{RAY_HERE}"', "not all machines have joined the Ray")
            if target.apart
            else []
        ),
        target.command(urls),
    ]
    return _task(
        target, MAIN, run, "tasks,cluster" if target.on_ray else "tasks", **_machine(target)
    ) | _kept(target)


def _workers(target: LaunchTarget) -> dict[str, Any]:
    head = f"{MAIN}-0.{GROUP}:{RAY_PORT}"
    run = [
        "export RAY_AUTH_MODE=token",
        *within(f'ray start --address="{head}" --disable-usage-stats --block', "no Ray to join"),
    ]
    return _task(
        target, WORKERS, run, "tasks,cluster", target.settings.nodes - 1, **_machine(target)
    ) | _kept(target)


def _check_gpus(target: LaunchTarget) -> None:
    wanting = [service for service, _ in target.own if service.gpus]
    if wanting and not target.accelerators[0]:
        raise PlanError.of(
            "job-accelerators",
            f"the GPU type of service '{wanting[0].name}' is unknown",
            found=f"no --{HEAD}.accelerators",
            expected="NAME:COUNT of each machine; services use the same NAME",
            remedy=f"set --{HEAD}.accelerators H100:8",
        )


def _service(target: LaunchTarget, service: Service, port: int, urls: dict[str, str]) -> dict[str, Any]:
    name, _ = target.accelerators
    gpus = f"{name}:{service.gpus}" if service.gpus else None
    run = [f"export {PORT}={port}", command(service, port, urls)]
    return _task(
        target,
        task_of(service),
        run,
        "services,search",
        accelerators=gpus,
        cpus=f"{service.cpus}+" if service.cpus else None,
    )


def command(service: Service, port: int, urls: dict[str, str]) -> str:
    """Return the shell command that starts a service in its task.

    `rlflow serve` listens on all addresses of its machine, because other machines call it. It's protected by
    its token.
    """
    words = service.command(port, urls)
    serving = words[:2] == ["rlflow", "serve"] and "--host" not in words
    return " ".join([*map(quoted, words), *(["--host", "0.0.0.0"] if serving else [])])
