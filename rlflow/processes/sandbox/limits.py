"""The environment and the resource limits of a process that handles untrusted text. The standard library
alone."""

from __future__ import annotations

import contextlib
import os
import resource
import site
from collections.abc import Iterable, Mapping

KEPT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONHASHSEED",
    "LANG",
    "LANGUAGE",
    "TZ",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "RLFLOW_OUTAGES",
)
BEGINNINGS, ENDINGS = ("LC_", "RLFLOW_SERVICE_"), ("_NUM_THREADS",)  # URLs of the run's services too


def environment(folder: str, extra: Iterable[str] = ()) -> dict[str, str]:
    """The environment for a process that handles untrusted text: of this process's variables those that hold
    no secret (paths, language, threads) and those named in ``extra``. HOME and TMPDIR are ``folder``."""
    names = [
        name for name in os.environ if name in KEPT or name.startswith(BEGINNINGS) or name.endswith(ENDINGS)
    ]
    variables = {name: os.environ[name] for name in (*names, *extra) if name in os.environ}
    if "PYTHONPATH" in variables:  # the process has another working folder
        variables["PYTHONPATH"] = os.pathsep.join(
            os.path.abspath(path) for path in variables["PYTHONPATH"].split(os.pathsep) if path
        )
    # they lie at the real home
    packages = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    return {"HOME": folder, "TMPDIR": folder, **packages, **variables}


def take(limits: Mapping[int, int]) -> None:
    """Set resource limits of this process, soft and hard, so that it cannot raise them again. ``limits``: a
    constant RLIMIT_… → its limit. Limits that the kernel lacks are left out."""
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)


def threads() -> int:
    """The number of threads of this user's processes, which the kernel counts for RLIMIT_NPROC. It reads
    /proc itself, since a process behind walls imports no more than it needs."""
    total, user = 0, os.getuid()
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if os.stat(f"/proc/{entry}").st_uid == user:
                    with open(f"/proc/{entry}/stat", "rb") as file:
                        total += int(file.read().rpartition(b")")[2].split()[17])
    return total
