"""The walls around each kind of process that handles untrusted text. A process puts them up itself before it
reads any such text.

Here too: what Python must be able to read to run, by the standard library alone.
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

OWN = "rlflow"  # begins the names of this project's packages, in which tasks lie with their answers
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
    """The folders of installed packages."""
    paths = sysconfig.get_paths()
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return list(dict.fromkeys([paths["purelib"], paths["platlib"], *site.getsitepackages(), *user]))


def readable() -> Iterator[str]:
    """Files and folders: the interpreter's own modules, the system's libraries, and each installed package
    but this project's."""
    paths = sysconfig.get_paths()
    yield from SYSTEM
    yield from glob.glob(os.path.join(sys.base_prefix, "lib", "*.so*"))
    for folder in dict.fromkeys([paths["stdlib"], paths["platstdlib"]]):
        yield from _entries(folder, ("site-packages", "dist-packages"))
    for folder in packages():
        yield from _entries(folder)


def listed() -> list[str]:
    """Folders whose names may be listed, which an import does."""
    return [*packages(), sysconfig.get_paths()["stdlib"]]


def _entries(folder: str, without: tuple[str, ...] = ()) -> Iterator[str]:
    if os.path.isdir(folder):
        yield from (
            os.path.join(folder, name)
            for name in os.listdir(folder)
            if name not in without and not name.startswith(OWN)
        )


GPUS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
CACHE = 16 << 20  # most bytes of a file that a scorer's libraries write
FILE = 16 << 30  # most bytes of a file that a user's reward writes
OPEN = 256  # most files that a process has open which only computes
FILES = 4096  # most files that a process has open
PROCESSES = 4096  # most processes beyond those that the user has already; the kernel does not count root's
ALONE = (
    *kernel.NETWORK,
    *kernel.PROGRAMS,
    *kernel.SIGNALS,
    *kernel.PROCESSES,
    *kernel.SYSTEM,
    *kernel.ATTRIBUTES,
    *kernel.SHARED,
)
SHARE = 0.75  # of the machine's memory that a user's reward may take


def around_scorers(folder: str) -> None:
    """Put up the walls around a process of scorers that come with rlflow and its libraries, which only
    compute: no network, no program, no change of a file outside of ``folder``, no access to other processes.
    It may fork, since some answers are scored in a child."""
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
    """Put up further walls in a child of such a process that scores a few answers: it may not write a file,
    fork, or change its limits."""
    limits.take({resource.RLIMIT_FSIZE: 0})
    kernel.refuse(("prlimit64",), forks=False)


def around_templates() -> None:
    """Put up the walls around the program that renders chat templates: no network, program, fork, other
    process or change of a file."""
    kernel.no_new_privileges()
    kernel.keep_capabilities(0)
    kernel.only_change(["/dev/null"])
    kernel.refuse(ALONE, forks=False)


def around_code(folder: str, megabytes: int, seconds: float) -> None:
    """Put up the walls around code that strangers or models wrote: it may compute, and read the interpreter,
    its packages and ``folder``.
    ``megabytes``: of memory. ``seconds``: for which each core may work for it."""
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
    """Put up the walls around a process of users' rewards: it may start programs, change files in ``folders``
    only, and reach the network if ``network`` holds. ``memory``: the most bytes of a process; None: a share
    of the machine's memory."""
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
