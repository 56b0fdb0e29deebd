"""The private parts of Ray that rlflow uses. No other module names a private part of Ray.

The modules used here were loaded by ``import ray``, or don't exist in this version of Ray. Each function says
what it returns if a part is missing. `tests/cluster/test_ray_private.py` fails if a release of Ray changes
one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

# methods of Ray's node that each start a process which a run does not need
UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")
# ports of the agents; the raylet waits until each port is reported
PORTS = ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT")
NO_PORT = -1  # value that Ray's agents report for a port they do not serve


def services() -> Any:
    """Return the module whose ``start_ray_process`` starts each of Ray's processes, or None."""
    module = sys.modules.get("ray._private.services")
    return module if hasattr(module, "start_ray_process") else None


def node_class() -> Any:
    """Return the class of Ray's nodes, or None if it lacks one of the methods in ``UNUSED``."""
    node = getattr(sys.modules.get("ray._private.node"), "Node", None)
    return node if all(hasattr(node, name) for name in UNUSED) else None


def has_no_dashboard(node: Any) -> None:
    """Tell one of Ray's nodes that its dashboard wasn't started."""
    node._webui_url = ""


def setup_worker() -> str:
    """Return the path of Ray's program that sets up a worker's environment before the worker starts.

    The raylet needs it only for a runtime_env.
    """
    folder = os.path.dirname(os.path.abspath(str(sys.modules["ray._private.node"].__file__)))
    return os.path.join(folder, "workers", "setup_worker.py")


def report_no_ports(raylet: Sequence[str]) -> bool:
    """Tell the raylet, on behalf of its agents, that they serve no ports.

    ``raylet``: the raylet's command. Returns False if the agents in this version of Ray don't report their
    ports in files.
    """
    flags, names = dict(word.partition("=")[::2] for word in raylet), sys.modules.get("ray._raylet")
    if not hasattr(names, "persist_port") or not {"--session_dir", "--node_id"} <= flags.keys():
        return False
    persist: Any = getattr(names, "persist_port", None)
    for port in PORTS:
        persist(flags["--session_dir"], flags["--node_id"], getattr(names, f"{port}_PORT_NAME"), NO_PORT)
    return True


def listens_on_all_addresses() -> bool:
    """Whether a Ray cluster started now would listen on all addresses of the machine."""
    return bool(getattr(_constants(), "ENABLE_RAY_CLUSTER", True))


def listen_on_all_addresses(wanted: bool) -> None:
    """Set whether Ray clusters started later listen on all of the machine's addresses or only on 127.0.0.1.

    By itself, Ray uses only 127.0.0.1 on systems where it doesn't support clusters.
    """
    _constants().ENABLE_RAY_CLUSTER = wanted


def print_no_logs() -> None:
    """Stop Ray from printing the logs of its processes. Does nothing in versions without this part."""
    module: Any = sys.modules.get("ray._private.worker")
    if hasattr(module, "print_to_stdstream"):
        module.print_to_stdstream = lambda *words, **more: None


def forget_token() -> None:
    """Clear Ray's cached token, so that Ray reads it again when it next needs it.

    Does nothing without Ray, or in versions that don't cache the token.
    """
    loader: Any = getattr(sys.modules.get("ray._raylet"), "AuthenticationTokenLoader", None)
    if hasattr(loader, "instance"):
        loader.instance().reset_cache()


def _constants() -> Any:
    return sys.modules["ray._private.ray_constants"]
