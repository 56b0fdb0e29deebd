"""Choose the network interface for ranks of a pool on several machines.

Interfaces that can be reached from the public internet are refused.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple

import psutil

from rlflow.errors import PlanError, listed, nearest

INTERNET = (socket.AF_INET, socket.AF_INET6)


class Interface(NamedTuple):
    """A network interface with one of its addresses."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return this machine's network interfaces, one entry per address, IPv4 first."""
    found = [
        (each.family, name, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
    ]
    return [
        Interface(name, address.partition("%")[0])
        for wanted in INTERNET
        for family, name, address in found
        if family == wanted
    ]


def chosen(
    wanted: str | None, head: str, insecure: bool, there: Iterable[Interface] | None = None
) -> Interface:
    """Return the interface that ranks use to talk to each other.

    ``wanted``: an interface's name, its address, or a network that contains its address, such as 10.0.0.0/8.
    If it is None, the interface with the route to ``head``, the cluster's first machine, is used. ``there``:
    the interfaces to choose from, by default this machine's. Raises PlanError if there is no such interface,
    or if its address is public and ``insecure`` is false.
    """
    there = interfaces() if there is None else list(there)
    interface = (
        _by_route(head, there)
        if wanted is None
        else next((each for each in there if _is(each, wanted)), None)
    )
    if interface is None:
        names = dict.fromkeys(each.name for each in there)
        raise PlanError.of(
            "no-interface",
            f"{socket.gethostname()} does not have a network interface '{wanted}'"
            if wanted
            else f"{socket.gethostname()} does not have a network interface that leads to {head}",
            found=listed(f"{each.name} {each.address}" for each in there),
            expected="a name, an address, or a network",
            nearest=nearest(wanted or "", names),
            remedy="--interface NAME, or --interface 10.0.0.0/8",
        )
    refuse_public([interface.address], insecure)
    return interface


def _is(interface: Interface, wanted: str) -> bool:
    if interface.name == wanted:
        return True
    try:
        return ipaddress.ip_address(interface.address) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def _by_route(head: str, there: Iterable[Interface]) -> Interface | None:
    """Return the interface that packets to ``head`` would use, or None. Sends no packet."""
    family = socket.AF_INET6 if ":" in head else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((head, 1))
            own = asking.getsockname()[0]
    except OSError:
        return None
    return next((each for each in there if each.address == own), None)


def refuse_public(hosts: Iterable[str], insecure: bool) -> None:
    """Raise PlanError if any of the addresses is public, unless ``insecure`` is true.

    The programs that listen on these addresses use no secret or send it unencrypted.
    """
    public = [host for host in hosts if any(map(is_public, _resolved(host)))]
    if public and not insecure:
        raise PlanError.of(
            "public-address",
            "ranks would communicate over addresses that the public internet may reach",
            found=listed(public),
            expected="addresses of a private network",
            remedy="--interface NAME of a private network; or --insecure true if a firewall protects "
            "this one",
        )


def _resolved(host: str) -> list[str]:
    try:
        return [str(answer[4][0]) for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def is_public(address: str) -> bool:
    """Whether an address is on the public internet."""
    return ipaddress.ip_address(address.partition("%")[0]).is_global
