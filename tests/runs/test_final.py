"""The model in final/ ends its replies at the same tokens as the run."""

import json
import shutil

import pytest
from sources import TASKS

import rlflow
from rlflow.data.ends import ends_of

MODEL = TASKS / "arithmetic_model"

pytestmark = pytest.mark.slow


def test_the_final_generation_config_names_every_end_token(tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_k": 5}))
    run = rlflow.run(
        "grpo",
        model=str(folder),
        data="chain_sum",
        iterations=1,
        prompts=2,
        held_out=2,
        threads=1,
        out=str(tmp_path / "runs"),
        **{"hp.max_tokens": 8, "hp.samples": 2},
    )
    final = run.folder / "final" / "actor"
    written = json.loads((final / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["top_k"]) == ([1, 7], 5), (
        "transformers alone writes no top_k without do_sample"
    )
    assert ends_of(final).problems == []
    usual = (run.folder / "settings.json").stat().st_mode
    # everyone who can read the other files can read the weights
    assert [path.name for path in final.iterdir() if path.stat().st_mode != usual] == []
    assert "name different tokens as the end of a reply" in (run.folder / "notes.txt").read_text()
