"""Every backend meets the promises of ``rlflow/training/protocols.py``, on one rank and on two.
``contract.py`` has the claims.

The test finds backends by name. Add others by their dotted names: ``RLFLOW_BACKENDS="their.module" pytest
tests/backends/test_contract.py``. Each claim is a subtest.
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
def test_claims_about_one_shape_hold_in_this_process(checked, subtests, name, shape):
    checked.check(subtests, name, 1, [claim for claim in contract.named(name, 1) if f": {shape}: " in claim])


CASES = [
    pytest.param(name, ranks, marks=pytest.mark.slow if ranks == 1 else pytest.mark.long)
    for name in BACKENDS
    for ranks in (1, 2)
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_every_claim_holds(checked, subtests, name, ranks):
    checked.check(subtests, name, ranks, contract.named(name, ranks))


def test_a_missing_package_fails_unless_skipping_is_requested(checked, monkeypatch):
    missing = {"unusable": "the package 'theirs' is not installed"}
    monkeypatch.setitem(checked.kept, ("their.backend", 2, "contract,own"), [{"their.backend": missing}] * 2)
    monkeypatch.delenv("RLFLOW_SKIP_ENGINES", raising=False)
    with pytest.raises(
        pytest.fail.Exception, match=r"'theirs' is not installed: `make setup` (.*)RLFLOW_SKIP_ENGINES=1"
    ):
        checked.failures("their.backend", 2, "any claim")
    monkeypatch.setenv("RLFLOW_SKIP_ENGINES", "1")
    with pytest.raises(pytest.skip.Exception, match="'theirs' is not installed"):
        checked.failures("their.backend", 2, "any claim")
