"""A claim falsified by a proof is an alarm, with its number and its line."""

import json

import pytest

from rlflow.errors import Place
from rlflow.monitoring.diagnosis.proved import falsified
from rlflow.monitoring.explained import PROOF
from rlflow.runs.proof.claims import Claim, encoded
from rlflow.runs.session import PROOF_JSON


def test_falsified_claims_are_read_as_alarms_in_order():
    place = Place("/away/e_sign.py", 44)
    claims = [
        Claim("gradient", "actor.update", "proved", "it has a gradient"),
        Claim("padding", "critic.update", "falsified", "it counts"),
        Claim(
            "reward-direction",
            "actor.update",
            "falsified",
            "rows are made less likely",
            "correlation -0.9",
            place,
        ),
    ]
    one, two = (claim.finding() for claim in falsified(json.loads(encoded(claims))))
    assert (one.name, two.name, two.alarm) == ("padding", "reward-direction", True)
    assert (
        two.words
        == "actor.update: rows are made less likely (correlation -0.9), according to the proof before iteration 1"
    )
    assert two.remedy == f"correct {place}; test it again with rlflow prove FILE"
    assert one.remedy == "correct it; test it again with rlflow prove FILE"
    assert PROOF == PROOF_JSON


@pytest.mark.parametrize("content", [{}, {"claims": None}, {"claims": ["falsified", {"verdict": "proved"}]}])
def test_other_content_gives_no_alarm(content):
    assert falsified(content) == []
