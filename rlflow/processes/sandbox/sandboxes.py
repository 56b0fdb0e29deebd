"""The sandboxes for the different kinds of processes that handle untrusted text.

A process enters its sandbox before it reads such text. This module also lists the files that Python needs to
read. Uses only the standard library.
"""

from __future__ import annotations

import glob
import math
import os
import resource
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence

from rlflow.processes.sandbox import kernel, limits

OWN = "rlflow"  # prefix of this project's packages, which contain tasks together with their answers
SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/urandom",
    "/dev/random",
    "/sys/devices/system/cpu",
)


def packages() -> list[str]:
    """Return the folders that Python packages are installed in."""
    paths = sysconfig.get_paths()
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return list(dict.fromkeys([paths["purelib"], paths["platlib"], *site.getsitepackages(), *user]))


def readable() -> Iterator[str]:
    """Yield the files and folders that sandboxed code may read.

    These are the interpreter's modules, the system's libraries, and installed packages other than rlflow.
    """
    paths = sysconfig.get_paths()
    yield from SYSTEM
    yield from glob.glob(os.path.join(sys.base_prefix, "lib", "*.so*"))
    for folder in dict.fromkeys([paths["stdlib"], paths["platstdlib"]]):
        yield from _entries(folder, ("site-packages", "dist-packages"))
    for folder in packages():
        yield from _entries(folder)


def listed() -> list[str]:
    """Return the folders that sandboxed code may list, because importing modules requires it."""
    return [*packages(), sysconfig.get_paths()["stdlib"]]


def _entries(folder: str, without: tuple[str, ...] = ()) -> Iterator[str]:
    if os.path.isdir(folder):
        yield from (
            os.path.join(folder, name)
            for name in os.listdir(folder)
            if name not in without and not name.startswith(OWN)
        )


GPUS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
CACHE = 16 << 20  # maximum size in bytes of a file that a scorer's libraries write
FILE = 16 << 30  # maximum size in bytes of a file that a user's reward writes
OPEN = 256  # maximum number of open files of a process that only computes
FILES = 4096  # maximum number of open files of other processes
PROCESSES = 4096  # how many more processes the user may have than now; the kernel doesn't limit root
ALONE = (
    *kernel.NETWORK,
    *kernel.PROGRAMS,
    *kernel.SIGNALS,
    *kernel.PROCESSES,
    *kernel.SYSTEM,
    *kernel.ATTRIBUTES,
    *kernel.SHARED,
)
SHARE = 0.75  # share of the machine's memory that the process of a user's reward may use


def around_scorers(folder: str) -> None:
    """Enter the sandbox for rlflow's own scorers and their libraries.

    They can compute and little else: no network, no other programs, no changes to files outside ``folder``,
    and no access to other processes. They may fork, because some answers are scored in a child process.
    """
    kernel.no_new_privileges()
    kernel.keep_capabilities(kernel.OF_FILES)
    kernel.only_change([folder, "/dev/null"])
    kernel.refuse(
        (
            *kernel.NETWORK,
            *kernel.PROGRAMS,
            *kernel.SIGNALS,
            *kernel.SYSTEM,
            *kernel.ATTRIBUTES,
            *kernel.SHARED,
            *(name for name in kernel.PROCESSES if name != "prlimit64"),
        )
    )
    limits.take({resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: CACHE, resource.RLIMIT_NOFILE: OPEN})


def around_answers() -> None:
    """Tighten the sandbox in a scorer's child process, which can't write files, fork or change limits."""
    limits.take({resource.RLIMIT_FSIZE: 0})
    kernel.refuse(("prlimit64",), forks=False)


def around_templates() -> None:
    """Enter the sandbox for the process that renders chat templates.

    It has no network, and can't start programs, fork, access other processes or change files.
    """
    kernel.no_new_privileges()
    kernel.keep_capabilities(0)
    kernel.only_change(["/dev/null"])
    kernel.refuse(ALONE, forks=False)


def around_code(folder: str, megabytes: int, seconds: float) -> None:
    """Enter the sandbox for code from models or third parties.

    The code can compute, and read ``folder``, the interpreter and installed packages. ``megabytes``: how much
    memory it can use. ``seconds``: how long it can compute on each core.
    """
    kernel.no_new_privileges()
    kernel.keep_capabilities(kernel.OF_FILES)
    kernel.only_read([folder, *readable()], listed())
    limits.take(
        {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: OPEN,
            resource.RLIMIT_DATA: megabytes << 20,
            resource.RLIMIT_CPU: math.ceil(seconds) * (os.cpu_count() or 1) + 1,
        }
    )
    kernel.refuse(ALONE, forks=False, arguments=(*kernel.OUTLIVING, *kernel.UNCOUNTED))


def around_rewards(folders: Sequence[str], network: bool, memory: int | None) -> None:
    """Enter the sandbox for the user's own rewards.

    They can start programs, change files in ``folders`` and, if ``network`` is true, use the network.
    ``memory``: how many bytes each process can use, by default a share of the machine's memory.
    """
    kernel.no_new_privileges()
    kernel.keep_capabilities(kernel.OF_USERS)
    if "/" not in folders:
        kernel.only_change(
            [*folders, *kernel.DEVICES, *(path for pattern in GPUS for path in glob.glob(pattern))]
        )
    if not network:
        kernel.refuse(kernel.NETWORK)
    most = memory or int(SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits.take(
        {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: FILE,
            resource.RLIMIT_NOFILE: FILES,
            resource.RLIMIT_DATA: most,
            resource.RLIMIT_NPROC: limits.threads() + PROCESSES,
        }
    )
