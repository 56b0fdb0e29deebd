"""rlflow never runs code of a model folder, even if the user answers yes."""

import json
import os
import shutil
import sys

import pytest
from run_faults import MODEL, in_child, run

EVIL = (
    "from pathlib import Path\nPath({mark!r}).write_text('ran')\nfrom transformers import "
    "{base}\n\n\nclass Evil({base}):\n    pass\n"
)
CLASSES = {
    "AutoTokenizer": "PreTrainedTokenizerFast",
    "AutoConfig": "Qwen3Config",
    "AutoModelForCausalLM": "Qwen3ForCausalLM",
}


def with_code(folder, mark, unknown):
    """Write a model folder that names its own classes for everything loaded from it. unknown: keys that
    transformers ignores."""
    shutil.copytree(MODEL, folder)
    for kind, base in CLASSES.items():
        (folder / f"evil_{kind}.py").write_text(EVIL.format(mark=str(mark), base=base))
        name = "tokenizer_config.json" if kind == "AutoTokenizer" else "config.json"
        known = json.loads((folder / name).read_text())
        value = f"evil_{kind}.Evil"
        own = {**known.get("auto_map", {}), kind: [value, value] if kind == "AutoTokenizer" else value}
        (folder / name).write_text(json.dumps({**known, **unknown, "auto_map": own}))


def answered(words, action):
    """Run an action in a child with these answers on standard input; return the exit status."""

    def answering():
        ours, theirs = os.pipe()
        os.write(theirs, words)
        os.close(theirs)
        os.dup2(ours, 0)
        sys.stdin = os.fdopen(0)
        action()

    return in_child(answering)


UNKNOWN = {"tokenizer_class": "EvilTokenizer", "model_type": "evil"}


@pytest.mark.parametrize(
    ("backend", "unknown"),
    [
        pytest.param("null", UNKNOWN, id="an unknown tokenizer"),
        pytest.param("null", {}, id="a tokenizer", marks=pytest.mark.slow),
        pytest.param("local", {}, id="a model", marks=pytest.mark.slow),
        pytest.param("local", UNKNOWN, id="an unknown model", marks=pytest.mark.slow),
    ],
)
def test_code_of_a_model_folder_never_runs_even_after_a_yes(backend, unknown, task, tmp_path):
    mark = tmp_path / "ran"
    with_code(tmp_path / "model", mark, unknown)
    keywords = {
        "model": str(tmp_path / "model"),
        "data": task["data"],
        "out": task["out"],
        "iterations": 1,
        "held_out": 0,
    }
    code = answered(b"y\n" * 20, lambda: run("grpo", keywords, "told", prompts=4, backend=backend))
    assert not mark.exists()
    assert code == 0 or unknown
