"""What a Python process must be able to read to run and to import what is installed. The standard library alone."""

from __future__ import annotations

import glob
import os
import site
import sys
import sysconfig
from collections.abc import Iterator

OWN = "rlflow"  # begins the names of this project's packages, in which tasks lie with their answers
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/null",
          "/dev/urandom", "/dev/random", "/sys/devices/system/cpu")  # fmt: skip


def packages() -> list[str]:
    """The folders of installed packages."""
    paths = sysconfig.get_paths()
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return list(dict.fromkeys([paths["purelib"], paths["platlib"], *site.getsitepackages(), *user]))


def readable() -> Iterator[str]:
    """Files and folders: the interpreter's own modules, the system's libraries, and each installed package but this project's."""
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
        yield from (os.path.join(folder, name) for name in os.listdir(folder) if name not in without and not name.startswith(OWN))
