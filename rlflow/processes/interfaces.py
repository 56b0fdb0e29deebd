"""The network interface over which the ranks of a pool on several machines talk: one, and none that the whole
internet reaches."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import NamedTuple

import psutil

from rlflow.errors import PlanError, listed, nearest

INTERNET = (socket.AF_INET, socket.AF_INET6)


class Interface(NamedTuple):
    """An interface by the kernel's name, and one of its addresses."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """The network interfaces of this machine, once for each of their addresses, those of IPv4 first."""
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
    """The interface to talk over. wanted: its name, its address, or a network that its address is in, as in
    10.0.0.0/8; None: that of the route to ``head``, the address of the cluster's first machine. Raises
    PlanError where there is none, or where its address is public and not ``insecure``."""
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
            f"no network interface of {socket.gethostname()} is '{wanted}'"
            if wanted
            else f"no network interface of {socket.gethostname()} leads to {head}",
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
    """The interface over which packets to ``head`` would go. None are sent to find out."""
    family = socket.AF_INET6 if ":" in head else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((head, 1))
            own = asking.getsockname()[0]
    except OSError:
        return None
    return next((each for each in there if each.address == own), None)


def refuse_public(hosts: Iterable[str], insecure: bool) -> None:
    """Raises PlanError for addresses that are not of a closed network: what listens there knows no secret, or
    sends it in the clear."""
    public = [host for host in hosts if any(map(is_public, _resolved(host)))]
    if public and not insecure:
        raise PlanError.of(
            "public-address",
            "ranks would talk over addresses that the whole internet may reach",
            found=listed(public),
            expected="addresses of a private network",
            remedy="--interface NAME of a private network; or --insecure true where a firewall closes "
            "this one",
        )


def _resolved(host: str) -> list[str]:
    try:
        return [str(answer[4][0]) for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def is_public(address: str) -> bool:
    """Whether an address is one of the internet's."""
    return ipaddress.ip_address(address.partition("%")[0]).is_global
