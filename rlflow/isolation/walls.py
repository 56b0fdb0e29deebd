"""The walls around each kind of process that handles untrusted text, put up by the process itself before it reads any."""

from __future__ import annotations

import glob
import os
import resource
from collections.abc import Sequence

from rlflow.isolation import kernel, limits

GPUS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
CACHE = 16 << 20  # bytes of a file that a scorer's libraries keep
FILE = 16 << 30  # bytes of a file that a user's reward writes
FILES = 4096  # that a process has open
PROCESSES = 4096  # that a process may start beyond what its user has; the kernel counts root's for nothing
SHARE = 0.75  # of the machine's memory that a user's reward may take


def around_scorers(folder: str) -> None:
    """For scorers that come with rlflow and its libraries: they compute. No network, no program, no change of a file outside of ``folder``,
    no way to other processes. Forks are left, by which answers are judged apart."""
    kernel.no_new_privileges()
    kernel.keep_capabilities(kernel.OF_FILES)
    kernel.only_change([folder, "/dev/null"])
    kernel.refuse((*kernel.NETWORK, *kernel.PROGRAMS, *kernel.SIGNALS, *kernel.SYSTEM, *kernel.ATTRIBUTES,
                   *(name for name in kernel.PROCESSES if name != "prlimit64")))  # fmt: skip
    limits.take({resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: CACHE, resource.RLIMIT_NOFILE: 256})


def around_answers() -> None:
    """For a child of such a process that judges a few answers: nor may it write a file, start a process, or raise its limits again."""
    limits.take({resource.RLIMIT_FSIZE: 0})
    kernel.refuse(("prlimit64",), forks=False)


def around_templates() -> None:
    """For the program that renders chat templates: neither network, programs, other processes nor any change of a file."""
    kernel.no_new_privileges()
    kernel.keep_capabilities(0)
    kernel.only_change(["/dev/null"])
    kernel.refuse((*kernel.NETWORK, *kernel.PROGRAMS, *kernel.SIGNALS, *kernel.PROCESSES, *kernel.SYSTEM, *kernel.ATTRIBUTES), forks=False)


def around_rewards(folders: Sequence[str], network: bool, memory: int | None) -> None:
    """For users' rewards: they may start programs, change files in ``folders`` alone, and reach the network where ``network`` says so.
    memory: bytes of a process, or a share of the machine's."""
    kernel.no_new_privileges()
    kernel.keep_capabilities(kernel.OF_USERS)
    if "/" not in folders:
        kernel.only_change([*folders, *kernel.DEVICES, *(path for pattern in GPUS for path in glob.glob(pattern))])
    if not network:
        kernel.refuse(kernel.NETWORK)
    most = memory or int(SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits.take({resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: FILE, resource.RLIMIT_NOFILE: FILES, resource.RLIMIT_DATA: most,
                 resource.RLIMIT_NPROC: limits.threads() + PROCESSES})  # fmt: skip
