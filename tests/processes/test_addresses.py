import socket

from rlflow.processes.addresses import Address, addresses
from rlflow.processes.declare import Service


def test_each_process_has_a_port_of_its_own_that_is_free():
    services = [Service(name="search", run="serve"), Service(name="judge", run="serve", replicas=3), Service(name="far", run="http://far:1/x/")]
    places = addresses(services)
    ports = [port for place in places.values() for port in (*place.ports, *([place.front] if place.front else []))]
    assert len(set(ports)) == len(ports) == 5
    for port in ports:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", port))
    assert places["far"] == Address("http://far:1/x")
    assert places["search"].url == f"http://127.0.0.1:{places['search'].ports[0]}"
    assert places["judge"].url == f"http://127.0.0.1:{places['judge'].front}"
