"""A model folder with an unloadable tokenizer is reported."""

import shutil

import pytest
from run_faults import MODEL

from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.errors import PlanError


def test_a_missing_and_a_broken_tokenizer_are_refused(tmp_path):
    with pytest.raises(PlanError, match="has no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(PlanError, match="has no tokenizer that can be loaded"):
        load_tokenizer(tmp_path / "model")
