import socket

from rlflow.processes.addresses import Address, addresses
from rlflow.processes.declare import Service


def test_each_service_has_its_own_free_port():
    services = [
        Service(name="search", run="serve"),
        Service(name="judge", run="serve"),
        Service(name="far", run="http://far:1/x/"),
    ]
    places = addresses(services)
    ports = [place.port for place in places.values() if place.port]
    assert len(set(ports)) == len(ports) == 2
    for port in ports:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", port))
    assert places["far"] == Address("http://far:1/x")
    assert places["search"].url == f"http://127.0.0.1:{places['search'].port}"
