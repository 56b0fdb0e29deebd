"""The environment and the resource limits of a process that handles untrusted text. The standard library alone."""

from __future__ import annotations

import contextlib
import os
import resource
import site
from collections.abc import Iterable, Mapping

KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "LANG", "LANGUAGE", "TZ", "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER")  # fmt: skip
BEGINNINGS, ENDINGS = ("LC_",), ("_NUM_THREADS",)


def environment(folder: str, more: Iterable[str] = ()) -> dict[str, str]:
    """Of this process's environment what names no secret: paths, language, threads, and ``more``. What programs keep at home or in
    temporary folders goes to ``folder``."""
    names = [name for name in os.environ if name in KEPT or name.startswith(BEGINNINGS) or name.endswith(ENDINGS)]
    found = {name: os.environ[name] for name in (*names, *more) if name in os.environ}
    if "PYTHONPATH" in found:  # the process has another working folder
        found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in found["PYTHONPATH"].split(os.pathsep) if path)
    packages = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}  # they lie at the real home
    return {"HOME": folder, "TMPDIR": folder, **packages, **found}


def take(limits: Mapping[int, int]) -> None:
    """Bound what this process may use for ever, as far as the kernel knows such limits."""
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)


def threads() -> int:
    """Threads of this user's processes, which the kernel counts where it limits processes."""
    total, user = 0, os.getuid()
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if os.stat(f"/proc/{entry}").st_uid == user:
                    with open(f"/proc/{entry}/stat", "rb") as file:
                        total += int(file.read().rpartition(b")")[2].split()[17])
    return total
