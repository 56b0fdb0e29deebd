"""Environment variables and resource limits for a process that handles untrusted text.

Uses only the standard library.
"""

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
BEGINNINGS, ENDINGS = ("LC_", "RLFLOW_SERVICE_"), ("_NUM_THREADS",)  # includes the URLs of the run's services


def environment(folder: str, extra: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment variables for a process that handles untrusted text.

    These are this process's harmless variables (paths, language, threads) and those named in ``extra``. HOME
    and TMPDIR are ``folder``.
    """
    names = [
        name for name in os.environ if name in KEPT or name.startswith(BEGINNINGS) or name.endswith(ENDINGS)
    ]
    variables = {name: os.environ[name] for name in (*names, *extra) if name in os.environ}
    if "PYTHONPATH" in variables:  # paths become absolute, since the process has another working directory
        variables["PYTHONPATH"] = os.pathsep.join(
            os.path.abspath(path) for path in variables["PYTHONPATH"].split(os.pathsep) if path
        )
    # Packages that were installed for the user are in the real home folder.
    packages = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    return {"HOME": folder, "TMPDIR": folder, **packages, **variables}


def take(limits: Mapping[int, int]) -> None:
    """Set resource limits of this process for good, by setting both the soft and the hard limits.

    ``limits`` maps RLIMIT_… constants to values. Limits that the kernel doesn't support are skipped.
    """
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)


def threads() -> int:
    """Return how many threads this user has, which is what the kernel counts for RLIMIT_NPROC.

    Reads /proc directly, because a sandboxed process imports as little as possible.
    """
    total, user = 0, os.getuid()
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if os.stat(f"/proc/{entry}").st_uid == user:
                    with open(f"/proc/{entry}/stat", "rb") as file:
                        total += int(file.read().rpartition(b")")[2].split()[17])
    return total
