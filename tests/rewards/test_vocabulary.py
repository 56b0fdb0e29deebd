"""A reward model must read the tokens that the policy writes."""

import json

import pytest

from rlflow.errors import PlanError
from rlflow.rewards.vocabulary import check_same


@pytest.fixture
def folders(tmp_path):
    """A function from the vocabularies of two folders to the folders; None stands for a folder without a
    tokenizer.json."""

    def made(*vocabularies):
        for name, vocabulary in zip(("reward", "policy"), vocabularies, strict=True):
            (tmp_path / name).mkdir()
            if vocabulary is not None:
                (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        return tmp_path / "reward", tmp_path / "policy"

    return made


@pytest.mark.parametrize(
    "vocabularies", [({"a": 0}, {"a": 0}), ({"a": 0}, None), (None, {"a": 0}), (None, None)]
)
def test_equal_and_unknown_vocabularies_pass(folders, vocabularies):
    check_same(*folders(*vocabularies))


def test_other_vocabularies_are_refused_with_their_sizes(folders):
    with pytest.raises(PlanError, match="vocabularies of 1 and 2 entries that differ"):
        check_same(*folders({"a": 0}, {"a": 0, "b": 1}))
