"""Which TCP addresses this user's rlflow and Ray processes listen on, and whether other machines reach them."""

from __future__ import annotations

import ipaddress
import os
import re

import psutil

from rlflow.monitoring.secrets import masked

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
OURS = re.compile(r"rlflow|^(.*/)?(raylet|gcs_server)$|^ray::|^ray\.|/ray/")  # a word of the command line of rlflow or Ray
WORDS = 4  # words at the start of a command line that are compared with OURS
SHOWN = 80  # characters of a command line that are shown


def listening() -> list[str]:
    """One line per process and address: the address, whether it is open to the network, the pid and the command line."""
    lines = []
    for pid, command in processes():
        for host, port in addresses(pid):
            reach = "this machine only" if host.is_loopback else "open to the network"
            host_text = f"[{host}]" if host.version == 6 else str(host)
            lines.append(f"{host_text}:{port}  {reach}  pid {pid}  {command}")
    return sorted(set(lines))


def addresses(pid: int) -> list[tuple[Address, int]]:
    """Address and port of each TCP socket on which the process listens; none for a process that is gone or another user's."""
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return []
    return [(unmapped(connection.laddr.ip), connection.laddr.port) for connection in connections if connection.status == psutil.CONN_LISTEN]


def unmapped(text: str) -> Address:
    """The address that is written as ``text``; an IPv4 address that is written as IPv6 (``::ffff:127.0.0.1``) as IPv4."""
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def processes() -> list[tuple[int, str]]:
    """(pid, start of the command line) of this user's processes that are rlflow's or Ray's, or descendants of one. Secrets in the command
    line are masked. The process that asks is left out."""
    user = os.geteuid()
    running = {process.pid: process.info for process in psutil.process_iter(["ppid", "cmdline", "uids"])
               if process.info["uids"] is not None and process.info["uids"].effective == user}  # fmt: skip
    commands = {pid: info["cmdline"] or [] for pid, info in running.items()}
    ours = {pid for pid, words in commands.items() if any(OURS.search(word) for word in words[:WORDS])}
    while children := {pid for pid, info in running.items() if info["ppid"] in ours} - ours:
        ours |= children
    return [(pid, masked(" ".join(commands[pid]).strip())[:SHOWN]) for pid in sorted(ours - {os.getpid()})]
