"""A RayJob of KubeRay: the run on a Ray cluster that is created for it and ends with it.

Services are containers in the pod of Ray's head, so they end with the cluster. Each also gets a Kubernetes
Service, under whose name all pods can reach it.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from rlflow.cluster.submit.documents import joined
from rlflow.cluster.submit.skypilot import command, task_of
from rlflow.cluster.submit.target import HEAD, TOKEN, LaunchTarget
from rlflow.errors import PlanError
from rlflow.processes.declare import PORT, Service

API = "ray.io/v1"
FOLDER = "/etc/rlflow"  # folder of the algorithm's file on the head
RETRIES = 3  # restarts of a job with kept storage after the loss of its head; each resumes the run


def ray_job(target: LaunchTarget) -> str:
    """Return the RayJob and the documents that go with it as YAML, for ``kubectl create``.

    Raises PlanError if no container image is given.
    """
    if target.settings.image is None:
        raise PlanError.of(
            "job-image",
            "a pod needs an image with rlflow installed",
            found=f"no --{HEAD}.image",
            expected="an image in a registry",
            remedy=f"set --{HEAD}.image REGISTRY/NAME:TAG",
        )
    urls = {service.name: f"http://{target.name}-{task_of(service)}:{port}" for service, port in target.own}
    documents = [
        *_file(target),
        _job(target, urls),
        *(_named(target, service, port) for service, port in target.own),
    ]
    keys = "".join(f' --from-literal={key_of(name)}="${name}"' for name in target.secrets)
    secret = [f"kubectl create secret generic {secret_of(target)}{keys}"] if keys else []
    return joined(
        [*secret, "kubectl create -f FILE, where FILE contains this text", *target.warnings], documents
    )


def secret_of(target: LaunchTarget) -> str:
    """Return the name of the Kubernetes secret that contains the run's secrets."""
    return f"{target.name}-secrets"


def key_of(variable: str) -> str:
    """Return the key of an environment variable in the run's Kubernetes secret.

    The key is the variable's name, except for Ray's token, which KubeRay expects under a different name.
    """
    return "auth_token" if variable == TOKEN else variable


def _file(target: LaunchTarget) -> list[dict[str, Any]]:
    """Return a ConfigMap with the algorithm's file, or an empty list for an included algorithm."""
    path = Path(target.file.partition("::")[0])
    if not path.is_file():
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{target.name}-file"},
            "data": {path.name: path.read_text()},
        }
    ]


def _job(target: LaunchTarget, urls: dict[str, str]) -> dict[str, Any]:
    path, colon, flow = target.file.partition("::")
    there = f"{FOLDER}/{Path(path).name}{colon}{flow}" if _file(target) else None
    run = target.command(urls, there)
    workers = {"workerGroupSpecs": [_workers(target, urls)]} if target.apart else {}
    head = {
        "rayStartParams": {},
        "template": {
            "metadata": {"labels": {"rlflow-run": target.name}},
            "spec": _pod(target, urls, head=True),
        },
    }
    secured = (
        {"authOptions": {"mode": "token", "secretName": secret_of(target)}} if TOKEN in target.secrets else {}
    )
    retries = RETRIES if target.keep is not None else 0
    spec = {
        "entrypoint": f"bash -c {shlex.quote(run)}",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _delay(target),
        "backoffLimit": retries,
        "rayClusterSpec": {**secured, "headGroupSpec": head, **workers},
    }
    return {"apiVersion": API, "kind": "RayJob", "metadata": {"name": target.name}, "spec": spec}


def _delay(target: LaunchTarget) -> int:
    return max([math.ceil(service.delay) for service, _ in target.own], default=0)


def _pod(target: LaunchTarget, urls: dict[str, str], head: bool) -> dict[str, Any]:
    ray: dict[str, Any] = {
        "name": "ray",
        "image": target.settings.image,
        "env": [*_secrets(target), *_addresses(target, urls)],
    }
    if needs := _resources(target.settings.cpus, target.accelerators[1]):
        ray["resources"] = needs
    containers, volumes = [ray], _kept(target)
    mounts = [{"name": "runs", "mountPath": target.keep.out}] if target.keep is not None else []
    if head and _file(target):
        mounts.append({"name": "algorithm", "mountPath": FOLDER})
        volumes.append({"name": "algorithm", "configMap": {"name": f"{target.name}-file"}})
    if mounts:
        ray["volumeMounts"] = mounts
    if head:
        containers += [_container(target, service, port, urls) for service, port in target.own]
    return {"containers": containers, **({"volumes": volumes} if volumes else {})}


def _kept(target: LaunchTarget) -> list[dict[str, Any]]:
    """Return the volume that keeps the run's folder."""
    if target.keep is None:
        return []
    path = {"hostPath": {"path": target.keep.name, "type": "DirectoryOrCreate"}}
    return [
        {
            "name": "runs",
            **(
                path
                if target.keep.kind == "path"
                else {"persistentVolumeClaim": {"claimName": target.keep.name}}
            ),
        }
    ]


def _resources(cpus: int | None, gpus: int) -> dict[str, Any]:
    limits = ({"nvidia.com/gpu": gpus} if gpus else {}) | ({"cpu": cpus} if cpus else {})
    return {"limits": limits, "requests": dict(limits)} if limits else {}


def _secrets(target: LaunchTarget) -> list[dict[str, Any]]:
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret_of(target), "key": key_of(name)}}}
            for name in target.secrets if name != TOKEN]  # fmt: skip  # KubeRay passes the token to Ray itself


def _addresses(target: LaunchTarget, urls: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": service.variable, "value": literal(urls.get(service.name, service.run))}
        for service in target.services
    ]


def _container(target: LaunchTarget, service: Service, port: int, urls: dict[str, str]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": task_of(service),
        "image": target.settings.image,
        "command": ["bash", "-c", literal(command(service, port, urls))],
        "env": [*_secrets(target), {"name": PORT, "value": str(port)}],
        "ports": [{"containerPort": port}],
    }
    if needs := _resources(service.cpus, service.gpus):
        container["resources"] = needs
    return container


def literal(text: str) -> str:
    """Escape a string so that Kubernetes passes it to a container unchanged.

    Kubernetes would otherwise replace ``$(NAME)`` with the value of a variable, which may be a secret.
    """
    return text.replace("$(", "$$(")


def _named(target: LaunchTarget, service: Service, port: int) -> dict[str, Any]:
    """Return the Kubernetes Service that gives a name to one of the services in the pod of Ray's head."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{target.name}-{task_of(service)}"},
        "spec": {"selector": {"rlflow-run": target.name}, "ports": [{"port": port, "targetPort": port}]},
    }


def _workers(target: LaunchTarget, urls: dict[str, str]) -> dict[str, Any]:
    count = target.settings.nodes - 1
    sizes = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), count)
    return {
        "groupName": "workers",
        **sizes,
        "rayStartParams": {},
        "template": {"spec": _pod(target, urls, head=False)},
    }
