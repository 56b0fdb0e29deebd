"""Every backend does what ``rlflow/training/protocols.py`` promises, on one rank and on two: the claims are
in ``contract.py``.

Backends are found by name. Others take part by their dotted names:
``RLFLOW_BACKENDS="their.module" pytest tests/backends/test_contract.py``. Each claim is a subtest.
"""

import os
import pkgutil

import contract
import pytest

import rlflow.backends

BACKENDS = [module.name for module in pkgutil.iter_modules(rlflow.backends.__path__)] + os.environ.get(
    "RLFLOW_BACKENDS", ""
).split()


@pytest.mark.parametrize(("name", "shape"), [("null", contract.SHAPES[0]), ("local", "llama")])
def test_claims_of_one_shape_hold_without_any_process(judged, subtests, name, shape):
    judged.hold(subtests, name, 1, [claim for claim in contract.named(name, 1) if f": {shape}: " in claim])


CASES = [
    pytest.param(name, ranks, marks=pytest.mark.slow if ranks == 1 else pytest.mark.long)
    for name in BACKENDS
    for ranks in (1, 2)
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_every_claim_holds(judged, subtests, name, ranks):
    judged.hold(subtests, name, ranks, contract.named(name, ranks))


def test_a_missing_package_fails_and_is_skipped_on_request_alone(judged, monkeypatch):
    missing = {"unusable": "the package 'theirs' is not installed"}
    monkeypatch.setitem(judged.kept, ("their.backend", 2, "contract,own"), [{"their.backend": missing}] * 2)
    monkeypatch.delenv("RLFLOW_SKIP_ENGINES", raising=False)
    with pytest.raises(
        pytest.fail.Exception, match=r"'theirs' is not installed: `make setup` (.*)RLFLOW_SKIP_ENGINES=1"
    ):
        judged.said("their.backend", 2, "any claim")
    monkeypatch.setenv("RLFLOW_SKIP_ENGINES", "1")
    with pytest.raises(pytest.skip.Exception, match="'theirs' is not installed"):
        judged.said("their.backend", 2, "any claim")
