"""The network interface of ranks on several machines: the given one, or that of the route to the cluster, and
never a public one by default."""

import ipaddress
import socket

import pytest

from rlflow.errors import PlanError
from rlflow.processes.interfaces import Interface, chosen, interfaces, refuse_public

LO, CLUSTER, WIDE, SIX = (
    Interface("lo", "127.0.0.1"),
    Interface("ib0", "10.7.0.3"),
    Interface("eth0", "8.8.4.4"),
    Interface("ib0", "fd00::3"),
)
THERE = [LO, WIDE, CLUSTER, SIX]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("ib0", CLUSTER),
        ("10.0.0.0/8", CLUSTER),
        ("10.7.0.3", CLUSTER),
        ("10.7.0.9/24", CLUSTER),
        ("fd00::/8", SIX),
        ("lo", LO),
    ],
)
def test_an_interface_is_given_by_name_address_or_network(wanted, found):
    assert chosen(wanted, "10.7.0.1", False, THERE) == found


@pytest.mark.parametrize("wanted", ["ib1", "192.168.0.0/16", "10.7.0.0/33", ""])
def test_a_missing_interface_is_reported_with_the_existing_ones(wanted):
    with pytest.raises(PlanError, match="does not have a network interface") as refused:
        chosen(wanted, "10.7.0.1", False, THERE)
    assert "eth0 8.8.4.4" in str(refused.value)


def test_the_default_interface_is_that_of_the_route():
    assert LO in interfaces()
    assert chosen(None, "127.0.0.1", False) == LO
    with pytest.raises(PlanError, match="leads to 127.0.0.1"):
        chosen(None, "127.0.0.1", False, [CLUSTER])


def test_addresses_are_usable_and_ipv4_comes_first():
    found = interfaces()
    assert {each.name for each in found} <= {name for _, name in socket.if_nameindex()}
    # a zone would not be part of an address
    versions = [ipaddress.ip_address(each.address).version for each in found]
    assert versions == sorted(versions)
    with socket.socket() as listening:
        listening.bind((found[0].address, 0))


def test_a_public_address_is_refused_without_a_closed_network():
    with pytest.raises(PlanError, match=r"public internet(.|\n)*8\.8\.4\.4(.|\n)*--insecure true"):
        chosen("eth0", "10.7.0.1", False, THERE)
    assert chosen("eth0", "10.7.0.1", True, THERE) == WIDE
    for host in ("8.8.8.8", "2600::1"):
        with pytest.raises(PlanError, match="public|internet"):
            refuse_public([host], False)
    refuse_public(
        [
            "127.0.0.1",
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "fd00::1",
            "fe80::1",
            "::1",
            "no.such.host.invalid",
        ],
        False,
    )
