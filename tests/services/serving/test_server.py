import pytest
from served import asking

from rlflow.errors import PlanError
from rlflow.services.serving.server import application, check_host, chosen_port


def test_health_and_metrics_describe_the_server():
    with asking(application("retrieve", lambda: {"passages": 3})) as client:
        assert client.get("/health") == (200, {"status": "ok", "server": "retrieve", "passages": 3})
        assert client.get("/no-such-path")[0] == 404
        status, text = client.get("/metrics")
    assert status == 200
    assert 'rlflow_requests_total{path="/health",status="200"} 1.0' in text
    assert 'rlflow_requests_total{path="other",status="404"} 1.0' in text
    assert 'rlflow_request_seconds_count{path="/health"} 1.0' in text


def test_with_a_token_only_health_is_public(monkeypatch):
    monkeypatch.setenv("RLFLOW_SERVE_TOKEN", "secret")
    with asking(application("code", dict)) as client:
        assert client.get("/health")[0] == 200
        assert client.get("/metrics") == (
            401,
            {"detail": "the token of RLFLOW_SERVE_TOKEN is missing or wrong"},
        )
        assert client.get("/metrics", Authorization="Bearer other")[0] == 401
        assert client.get("/metrics", Authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "machine.example"])
def test_a_server_open_to_others_needs_a_token(host, monkeypatch):
    monkeypatch.delenv("RLFLOW_SERVE_TOKEN", raising=False)
    with pytest.raises(PlanError, match="set RLFLOW_SERVE_TOKEN"):
        check_host(host)
    monkeypatch.setenv("RLFLOW_SERVE_TOKEN", " \t")
    with pytest.raises(PlanError, match="only blanks in the variable"):
        check_host(host)
    monkeypatch.setenv("RLFLOW_SERVE_TOKEN", "secret")
    check_host(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_server_needs_no_token(host, monkeypatch):
    monkeypatch.delenv("RLFLOW_SERVE_TOKEN", raising=False)
    check_host(host)


def test_the_port_is_the_given_one_or_that_of_the_run(monkeypatch):
    monkeypatch.delenv("PORT", raising=False)
    assert (chosen_port(None), chosen_port(81)) == (8000, 81)
    monkeypatch.setenv("PORT", "9000")
    assert (chosen_port(None), chosen_port(81)) == (9000, 81)
    monkeypatch.setenv("PORT", "none")
    with pytest.raises(PlanError, match="--port NUMBER"):
        chosen_port(None)
