"""Restrictions that a process imposes on itself and its children for good (Linux).

Seccomp (Linux 3.5) refuses system calls by number, here on x86-64 and ARM64. Landlock (Linux 5.13) keeps the
process from changing files outside given folders and, optionally, from reading them. It also blocks access to
other processes and, since Linux 6.12, signals to them. Neither needs root. Restrictions that the kernel
doesn't support are skipped; ``rlflow.processes.sandbox.probe`` tells which of them work. Uses only the
standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2

# -- seccomp: system calls, and their numbers on each supported architecture ----------------------------

NETWORK = ("socket", "io_uring_setup")  # io_uring can also create sockets
PROGRAMS = ("execve", "execveat")
FORKS = ("fork", "vfork")
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
PROCESSES = (
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "prlimit64",
    "setpriority",
    "sched_setaffinity",
    "sched_setscheduler",
)
SYSTEM = (
    "bpf",
    "perf_event_open",
    "mount",
    "umount2",
    "unshare",
    "setns",
    "keyctl",
    "add_key",
    "request_key",
    "init_module",
    "finit_module",
    "kexec_load",
    "reboot",
    "settimeofday",
    "clock_settime",
    "open_by_handle_at",
)
SHARED = (
    "shmget",
    "shmat",
    "shmctl",
    "msgget",
    "msgsnd",
    "msgrcv",
    "msgctl",
    "semget",
    "semop",
    "semctl",
    "semtimedop",
    "mq_open",
    # Memory and queues that no limit on the process counts, and most of which remain when the process ends.
    "memfd_create",
)
ATTRIBUTES = (
    "chmod",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "chown",
    "lchown",
    "fchown",
    "fchownat",
    "utime",
    "utimes",
    "futimesat",
    # change times and attributes of files
    "utimensat",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
    "removexattr",
    "lremovexattr",
    "fremovexattr",
)

NUMBERS = {
    "x86_64": {
        "socket": 41,
        "io_uring_setup": 425,
        "execve": 59,
        "execveat": 322,
        "fork": 57,
        "vfork": 58,
        "clone": 56,
        "clone3": 435,
        "kill": 62,
        "tkill": 200,
        "tgkill": 234,
        "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297,
        "pidfd_send_signal": 424,
        "ptrace": 101,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "pidfd_getfd": 438,
        "prlimit64": 302,
        "setpriority": 141,
        "sched_setaffinity": 203,
        "sched_setscheduler": 144,
        "bpf": 321,
        "perf_event_open": 298,
        "mount": 165,
        "umount2": 166,
        "unshare": 272,
        "setns": 308,
        "keyctl": 250,
        "add_key": 248,
        "request_key": 249,
        "init_module": 175,
        "finit_module": 313,
        "kexec_load": 246,
        "reboot": 169,
        "settimeofday": 164,
        "clock_settime": 227,
        "chmod": 90,
        "fchmod": 91,
        "fchmodat": 268,
        "fchmodat2": 452,
        "chown": 92,
        "lchown": 94,
        "fchown": 93,
        "fchownat": 260,
        "utime": 132,
        "utimes": 235,
        "futimesat": 261,
        "utimensat": 280,
        "setxattr": 188,
        "lsetxattr": 189,
        "fsetxattr": 190,
        "removexattr": 197,
        "lremovexattr": 198,
        "fremovexattr": 199,
        "open_by_handle_at": 304,
        "shmget": 29,
        "shmat": 30,
        "shmctl": 31,
        "semget": 64,
        "semop": 65,
        "semctl": 66,
        "msgget": 68,
        "msgsnd": 69,
        "msgrcv": 70,
        "msgctl": 71,
        "semtimedop": 220,
        "mq_open": 240,
        "memfd_create": 319,
        "prctl": 157,
        "mmap": 9,
    },
    "aarch64": {
        "socket": 198,
        "io_uring_setup": 425,
        "execve": 221,
        "execveat": 281,
        "clone": 220,
        "clone3": 435,
        "kill": 129,
        "tkill": 130,
        "tgkill": 131,
        "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240,
        "pidfd_send_signal": 424,
        "ptrace": 117,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "pidfd_getfd": 438,
        "prlimit64": 261,
        "setpriority": 140,
        "sched_setaffinity": 122,
        "sched_setscheduler": 119,
        "bpf": 280,
        "perf_event_open": 241,
        "mount": 40,
        "umount2": 39,
        "unshare": 97,
        "setns": 268,
        "keyctl": 219,
        "add_key": 217,
        "request_key": 218,
        "init_module": 105,
        "finit_module": 273,
        "kexec_load": 104,
        "reboot": 142,
        "settimeofday": 170,
        "clock_settime": 112,
        "fchmod": 52,
        "fchmodat": 53,
        "fchmodat2": 452,
        "fchown": 55,
        "fchownat": 54,
        "utimensat": 88,
        "setxattr": 5,
        "lsetxattr": 6,
        "fsetxattr": 7,
        "removexattr": 14,
        "lremovexattr": 15,
        "fremovexattr": 16,
        "open_by_handle_at": 265,
        "msgget": 186,
        "msgctl": 187,
        "msgrcv": 188,
        "msgsnd": 189,
        "semget": 190,
        "semctl": 191,
        "semtimedop": 192,
        "semop": 193,
        "shmget": 194,
        "shmctl": 195,
        "shmat": 196,
        "mq_open": 180,
        "memfd_create": 279,
        "prctl": 167,
        "mmap": 222,
    },
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_… in linux/audit.h
X32 = 0x40000000  # numbers from here on belong to the x32 table of x86-64
CLONE_THREAD = 0x00010000
# byte offsets in the structure in which the kernel describes a call
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
# Instructions of the filter.
LOAD, AND, EQUALS, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


class Argument(NamedTuple):
    """A system call that is only refused with a certain argument.

    It is refused if the argument number ``place`` (from 0), masked with ``mask``, equals ``value``.
    """

    call: str
    place: int
    mask: int
    value: int


# With these options a process could outlive its parent: it could switch off the signal that ends it, or hide
# its environment from the search for it. PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_MM
OUTLIVING = tuple(Argument("prctl", 0, 0xFFFFFFFF, option) for option in (1, 4, 35))
# Memory that RLIMIT_DATA does not count: shared anonymous memory, and memory that grows downwards.
UNCOUNTED = (Argument("mmap", 3, 0x21, 0x21), Argument("mmap", 3, 0x100, 0x100))


def refuse(calls: Iterable[str], forks: bool = True, arguments: Iterable[Argument] = ()) -> bool:
    """Make these system calls fail in this thread and in all threads and processes that it starts.

    ``forks``: whether the thread may still start processes. ``arguments``: calls that only fail with certain
    arguments. Call ``no_new_privileges`` first. Returns whether the kernel applied the filter.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in NUMBERS:
        return False
    code = b"".join(_filter(machine, calls, forks, arguments))
    memory = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
    return int(_libc().prctl(PR_SET_SECCOMP, MODE_FILTER, program, 0, 0)) == 0


def _filter(
    machine: str, calls: Iterable[str], forks: bool, arguments: Iterable[Argument]
) -> Iterable[bytes]:
    """Yield the instructions of a seccomp filter.

    ``socket`` fails with EACCES, so that callers can tell why.
    """
    numbers = NUMBERS[machine]
    yield _step(LOAD, ARCHITECTURE)
    yield _step(EQUALS, ARCHITECTURES[machine], 1, 0)
    yield _step(RETURN, REFUSE | errno.EPERM)
    yield _step(LOAD, NUMBER)
    if machine == "x86_64":
        yield _step(AT_LEAST, X32, 0, 1)
        yield _step(RETURN, REFUSE | errno.EPERM)
    for name in calls if forks else (*calls, *FORKS):
        if name in numbers:
            yield _step(EQUALS, numbers[name], 0, 1)
            yield _step(RETURN, REFUSE | (errno.EACCES if name == "socket" else errno.EPERM))
    for call, place, mask, value in arguments:
        yield _step(EQUALS, numbers[call], 0, 5)
        yield _step(LOAD, FIRST_ARGUMENT + 8 * place)
        yield _step(AND, mask)
        yield _step(EQUALS, value, 0, 1)
        yield _step(RETURN, REFUSE | errno.EPERM)
        yield _step(LOAD, NUMBER)
    if not forks:
        yield _step(
            EQUALS, numbers["clone3"], 0, 1
        )  # the filter cannot read the flags of clone3; libraries fall back to clone
        yield _step(RETURN, REFUSE | errno.ENOSYS)
        yield _step(EQUALS, numbers["clone"], 0, 3)
        yield _step(LOAD, FIRST_ARGUMENT)
        yield _step(HAS_BITS, CLONE_THREAD, 1, 0)
        yield _step(RETURN, REFUSE | errno.EPERM)
    yield _step(RETURN, ALLOW)


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction of a seccomp filter.

    ``yes`` and ``no``: how many instructions to skip if a comparison is true or false.
    """
    return struct.pack("HBBI", code, yes, no, value)


# -- landlock
# ------------------------------------------------------------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on all architectures
PATH_BENEATH = 1
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
# permissions that apply to files; the other ones apply only to folders
OF_A_FILE = WRITE_FILE | READ_FILE | TRUNCATE
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove and create entries of each kind
REFER = 1 << 13  # rename and link between folders; since version 2 (truncate: since version 3)
SCOPES = 3  # abstract sockets, signals; since version 6
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def landlock_version() -> int:
    """Return the version of Landlock in the kernel, or 0 if it has none."""
    return max(0, int(_libc().syscall(CREATE_RULESET, None, 0, 1))) if sys.platform == "linux" else 0


def only_change(paths: Iterable[str]) -> bool:
    """Let this thread and everything it starts change only files at or below ``paths``.

    They can then only access processes under the same restriction. Call ``no_new_privileges`` first. Returns
    whether the kernel applied the restriction.
    """
    changes = _changes()
    return _restrict(changes, ((path, changes) for path in paths))


def only_read(paths: Iterable[str], listed: Iterable[str]) -> bool:
    """Let this thread and everything it starts read only files at or below ``paths``.

    They can list the names in folders at or below ``listed``, and change only /dev/null. Otherwise like
    ``only_change``.
    """
    rules = [*((path, READ_FILE | READ_DIR) for path in paths), *((path, READ_DIR) for path in listed)]
    rules += [("/dev/null", _changes() & OF_A_FILE)]
    return _restrict(_changes() | READ_FILE | READ_DIR, rules)


def _changes() -> int:
    version = landlock_version()
    return CHANGES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)


def _restrict(handled: int, allowed: Iterable[tuple[str, int]]) -> bool:
    """Refuse file permissions, except in some places. Returns whether the kernel applied this.

    ``handled``: the permissions to refuse, as bits. ``allowed``: (path, permissions still allowed there).
    """
    version = landlock_version()
    if not version:
        return False
    attributes = struct.pack("QQQ", handled, 0, SCOPES)[: 24 if version >= 6 else 8]
    rules = _libc().syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return False
    try:
        for path, rights in allowed:
            with contextlib.suppress(OSError):  # the path does not exist
                _allow(rules, path, rights)
        return int(_libc().syscall(RESTRICT_SELF, rules, 0)) == 0
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights &= ~0 if os.path.isdir(path) else OF_A_FILE
        _libc().syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


def no_new_privileges() -> bool:
    """Keep this process and its children from gaining permissions, even through setuid programs.

    Returns whether the kernel applied this.
    """
    return sys.platform == "linux" and int(_libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) == 0


def outlive() -> None:
    """Cancel the signal that this process gets when its parent ends. Raises OSError if that isn't allowed."""
    if _libc().prctl(1, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the signal at the end of the parent cannot be switched off")


OF_FILES = 0b00000110  # capabilities to read and write files of any owner
OF_USERS = 0b11111111  # also capabilities to change owners and users
CAPABILITY_VERSION = 0x20080522


def keep_capabilities(allowed: int) -> bool:
    """Drop all capabilities (the separate permissions of root) that aren't in ``allowed``, a set of bits.

    With the others, a root process could access all other processes. Returns whether the kernel applied this.
    """
    if sys.platform != "linux":
        return False
    header, data = struct.pack("Ii", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    if _libc().capget(header, data) != 0:
        return False
    # The upper halves contain no allowed capability.
    low = [word & allowed for word in struct.unpack("6I", data.raw)[:3]]
    return int(_libc().capset(header, struct.pack("6I", *low, 0, 0, 0))) == 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
