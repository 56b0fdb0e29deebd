"""Episodes in an environment of a real OpenEnv server. The server runs in another interpreter, because
openenv installs many packages. RLFLOW_OPENENV names that interpreter: `python -m venv E; E/bin/pip install
openenv==0.10.0`, then RLFLOW_OPENENV=E/bin/python."""

import http
import json
import os
import subprocess
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from websockets.sync.server import serve

from rlflow.rewards.environments.adapters.openenv import OpenEnvSession
from rlflow.rewards.environments.environment_pool import STRICT, EnvironmentPool, Failure
from rlflow.rewards.environments.environment_spec import parse_environment

SERVER = Path(__file__).parents[1] / "openenv_server.py"


@pytest.fixture
def url():
    if not (python := os.environ.get("RLFLOW_OPENENV")):
        pytest.skip("RLFLOW_OPENENV names no interpreter that has openenv")
    with subprocess.Popen([python, str(SERVER)], stdout=subprocess.PIPE, text=True) as server:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.kill()


@pytest.mark.slow
def test_sessions_of_a_server_are_episodes(url):
    spec = parse_environment(f"openenv:{url}", {"parallel": "1"})
    assert (spec.library, spec.source.repeatable) == ("openenv", False)
    with closing(EnvironmentPool(spec, replace(STRICT, network=True))) as pool:
        episodes, opened = pool.open([{"prompt": "?", "answer": answer} for answer in "789"], [0] * 3)
        first = pool.step(episodes, ["3", "9", "what"])
        last = pool.step(episodes[:2], ["7", "8"])
        assert [answer["says"] for answer in opened] == ["Guess."] * 3
        assert [answer["says"] for answer in first[:2]] == [" more. ", " less. "]
        assert isinstance(first[2], Failure)
        assert "ServerError: step: no number" in str(first[2].reason)
        assert [(answer["reward"], answer["done"]) for answer in last] == [(1.0, True)] * 2
        assert pool.end(episodes[:2]) == [{}, {}]


@pytest.mark.slow
def test_without_a_network_the_episode_fails_with_a_remedy(url):
    with closing(EnvironmentPool(parse_environment(f"openenv:{url}", {"parallel": "1"}))) as pool:
        _, (answer,) = pool.open([{"prompt": "?"}], [0])
    assert isinstance(answer, Failure)
    assert "cannot be reached" in str(answer.reason)
    assert "--reward-network true" in str(answer.reason)


def hinting(socket):
    for message in socket:
        if json.loads(message)["type"] == "reset":
            socket.send(json.dumps({"type": "observation", "data": {"observation": {"hint": "Guess."}}}))


@contextmanager
def refusing(*refusals):
    """A server in this process that refuses a number of connections, each with a status and headers, before
    it takes one."""
    left = list(refusals)

    def refused(connection, request):
        if not left:
            return None
        status, headers = left.pop(0)
        response = connection.respond(http.HTTPStatus(status), "not now")
        response.headers.update(headers)
        return response

    with serve(hinting, "127.0.0.1", 0, process_request=refused) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def test_a_busy_server_is_retried_and_redirects_are_followed():
    with refusing((503, {}), (429, {"Retry-After": "0"}), (307, {"Location": "/other"})) as url:
        session = OpenEnvSession(id=url)
        assert session.reset("?", seed=0) == "Guess."
        session.close()


def test_a_server_that_needs_a_token_is_not_retried():
    with (
        refusing((401, {"WWW-Authenticate": "Bearer"})) as url,
        pytest.raises(ConnectionError, match="401 .*WWW-Authenticate: Bearer"),
    ):
        OpenEnvSession(id=url)
