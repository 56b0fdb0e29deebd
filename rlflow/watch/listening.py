"""What of this user's rlflow and Ray processes listens on which address, from /proc alone."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from rlflow.watch.secrets import masked

LISTEN = "0A"
OURS = re.compile(r"rlflow|^(.*/)?(raylet|gcs_server)$|^ray::|^ray\.|/ray/")


def listening(proc: Path = Path("/proc")) -> list[str]:
    """A line per process and address; where it is open to the network, that is said."""
    sockets = addresses(proc)
    lines = []
    for pid, name in processes(proc):
        for inode in socket_inodes(proc / str(pid)):
            if inode in sockets:
                host, port = sockets[inode]
                reach = "this machine only" if host.is_loopback else "open to the network"
                lines.append(f"{shown(host)}:{port}  {reach}  pid {pid}  {name}")
    return sorted(set(lines))


def addresses(proc: Path) -> dict[str, tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Inode → address and port of each listening TCP socket."""
    found = {}
    for file in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / file).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN:
                found[fields[9]] = decoded(fields[1])
    return found


def decoded(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """``0100007F:1F90`` → 127.0.0.1, 8080: words of four bytes in the machine's order."""
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address, int(port, 16)


def shown(host: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return f"[{host}]" if host.version == 6 else str(host)


def processes(proc: Path) -> list[tuple[int, str]]:
    """This user's processes that are rlflow's or Ray's, and those that they started, with a short command line. This very process is
    left out."""
    found = {int(entry.name): process for entry in proc.iterdir() if entry.name.isdigit() and (process := _process(entry))}
    ours = {pid for pid, (_, words) in found.items() if any(OURS.search(word) for word in words[:4])}
    while more := {pid for pid, (parent, _) in found.items() if parent in ours} - ours:
        ours |= more
    return [(pid, masked(" ".join(found[pid][1]).strip())[:80]) for pid in sorted(ours - {os.getpid()})]


def _process(entry: Path) -> tuple[int, list[str]] | None:
    """The parent and the command line of a process of this user."""
    try:
        words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        return (int(parent), words) if entry.stat().st_uid == os.getuid() else None
    except (OSError, IndexError):  # it ended meanwhile
        return None


def socket_inodes(process: Path) -> Iterator[str]:
    try:
        for link in (process / "fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:  # it ended meanwhile, or is not ours to read
        return
