"""The recorded cases, and the verdict of each case: pass, transformed or not ours.

A test module assigns cases to its tests with the decorators ``as_is`` and ``transformed``, and marks cases
with ``not_ours``. An assigned test fails unless it compares every output of its case, except the outputs in
``BESIDE``.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.author.load import load
from rlflow.training.objective import MinibatchTotals, row_weights, weighted_sum

FOLDER = Path(__file__).parent
oracle_io = load(FOLDER / "oracle_io.py")
BESIDE = {  # outputs outside the compared arithmetic
    "metrics": "logged",
    "clipfrac": "logged",
    "clip_ratio": "logged",
    "ppo_kl": "logged",
    "is_std_zero": "logged",
    "eff_sample_size": "logged",
    "chosen_rewards": "logged",
    "rejected_rewards": "logged",
    "real_rewards": "logged",
    "generated_rewards": "logged",
    "keep_by_distinct": "another peer's rule",
    "keep_by_std32_ne_0": "another peer's rule",
    "keep_by_mean_in_0_1": "another peer's rule",
}


@dataclass
class Case:
    """One recorded result of another project: tensors by name, the peer's settings, and its tolerances."""

    id: str
    function: str
    peer: str
    version: str
    inputs: dict[str, Any]
    settings: dict[str, Any]
    expected: dict[str, Any]
    rtol: float
    atol: float
    compared: set[str] = field(default_factory=set)

    def agrees(self, where=None, rtol=0.0, atol=0.0, **got):
        """Check that each output in ``got`` equals the recorded output of the same name.

        where: bool, the rows or entries to compare; None compares all. rtol and atol widen the case's
        tolerances. Raises AssertionError at the first difference.
        """
        for name, value in got.items():
            want = self.expected[name]
            value, want = (value, want) if where is None else (value[where], want[where])
            found = oracle_io.mismatch(value, want, max(rtol, self.rtol), max(atol, self.atol))
            assert found is None, f"{self.id}, {name}: {found}"
        self.compared |= set(got)

    @functools.cached_property
    def mask(self):
        """bool [rows, T]: the case's mask, whose name depends on the peer; all True if the case has none."""
        names = ("response_mask", "loss_mask", "action_mask", "completion_mask", "mask")
        found = next((self.inputs[name] for name in names if name in self.inputs), None)
        tokens = next(x for x in self.inputs.values() if isinstance(x, torch.Tensor) and x.dim() == 2)
        return found.bool() if found is not None else torch.ones_like(tokens, dtype=torch.bool)

    @functools.cached_property
    def group(self):
        """int64 [rows]: the number of each row's group, in the alphabetical order of the groups' names."""
        index = self.inputs["index"]
        return torch.tensor([sorted(set(index)).index(name) for name in index])


@dataclass(frozen=True)
class Verdict:
    """The kind (pass, transformed or not ours), the reason, and the test that compares the case."""

    kind: str
    why: str = ""
    test: str = ""


def _case(raw):
    names = ("id", "function", "peer", "inputs", "expected", "rtol", "atol")
    return Case(version=raw["peer_version"], settings=raw["kwargs"], **{name: raw[name] for name in names})


CASES = {raw["id"]: _case(raw) for raw in oracle_io.load(FOLDER)}
VERDICTS: dict[str, Verdict] = {}


def as_is(*names):
    """Assign these cases to the test, which compares them as recorded."""
    return lambda test: _tied(test, dict.fromkeys(names, ""), "pass")


def transformed(why, *names):
    """Assign these cases to the test, which transforms inputs or outputs before it compares.

    why: the reason for all of ``names``, or a dictionary from the name of a case to its reason.
    """
    return lambda test: _tied(
        test, why if isinstance(why, dict) else dict.fromkeys(names, why), "transformed"
    )


def not_ours(why, *names):
    """Mark cases that no function of rlflow can be compared with."""
    for name in names:
        _place(name, Verdict("not ours", why))


def _tied(test, whys, kind):
    for name, why in whys.items():
        _place(name, Verdict(kind, why, f"{Path(test.__code__.co_filename).stem}::{test.__name__}"))

    @functools.wraps(test)
    def run(case):
        case.compared.clear()
        test(case)
        left = (
            {name for name, value in case.expected.items() if value is not None} - case.compared - set(BESIDE)
        )
        assert case.compared, f"{case.id}: nothing was compared"
        assert not left, f"{case.id}: not compared: {left}"

    return pytest.mark.parametrize("case", [CASES[name] for name in whys], ids=list(whys))(run)


def _place(name, verdict):
    """Record the verdict of a case.

    The same verdict may be recorded twice, because pytest and the page's test both load each module. Raises
    KeyError for an unknown case, and ValueError for a second, different verdict.
    """
    if name not in CASES:
        raise KeyError(f"there is no recorded case '{name}'")
    if VERDICTS.setdefault(name, verdict) != verdict:
        raise ValueError(f"the case '{name}' is placed twice: {VERDICTS[name]} and {verdict}")


def averaged(value, mask, mean):
    """Return the mean of a loss over a full minibatch, 0-d, with rlflow's own divisors."""
    counts = mask.sum(1)
    return weighted_sum(value, mask, row_weights(counts, mean, MinibatchTotals.of(counts)), mean)
