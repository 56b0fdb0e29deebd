"""Every backend does what ``rlflow/training/protocols.py`` promises, on one rank and on two: the claims are in ``contract.py``.

Backends are found by name. Others take part by their dotted names:
``RLFLOW_BACKENDS="their.module" pytest tests/backends/test_contract.py``.
"""

import os
import pkgutil

import contract
import pytest

import rlflow.backends

BACKENDS = [module.name for module in pkgutil.iter_modules(rlflow.backends.__path__)] + os.environ.get("RLFLOW_BACKENDS", "").split()
SLOW = pytest.mark.slow, pytest.mark.timeout(900)
ALL = [(name, ranks, claim) for name in BACKENDS for ranks in (1, 2) for claim in contract.named(name, ranks)]


def quick(name, ranks, claim):
    """Without processes, and of one shape."""
    return ranks == 1 and (name == "null" or (name == "local" and ": llama: " in claim))


@pytest.mark.parametrize(("name", "ranks", "claim"), [pytest.param(*each, marks=() if quick(*each) else SLOW) for each in ALL])
def test_it_holds(judged, name, ranks, claim):
    assert judged.said(name, ranks, claim) == [""] * ranks


def test_a_missing_package_fails_and_is_skipped_on_request_alone(judged, monkeypatch):
    monkeypatch.setitem(judged.kept, ("their.backend", 2), [{"their.backend": {"unusable": "the package 'theirs' is not installed"}}] * 2)
    monkeypatch.delenv("RLFLOW_SKIP_ENGINES", raising=False)
    with pytest.raises(pytest.fail.Exception, match=r"'theirs' is not installed: `make setup` (.*)RLFLOW_SKIP_ENGINES=1"):
        judged.said("their.backend", 2, "any claim")
    monkeypatch.setenv("RLFLOW_SKIP_ENGINES", "1")
    with pytest.raises(pytest.skip.Exception, match="'theirs' is not installed"):
        judged.said("their.backend", 2, "any claim")
