"""`from rlflow import …` gives the names in the contract, sorted, and the right object for each name."""

import re
import subprocess
import sys

import pytest
from sources import ROOT

import rlflow

CONTRACT = [
    "ALL",
    "DP_COMPUTE",
    "RANK0",
    "Batch",
    "flow",
    "loss",
    "stage",
    "repeat",
    "token",
    "row",
    "group",
    "scalar",
    "text",
    "masked_mean",
    "whiten",
    "place_last",
    "group_mean",
    "group_std",
    "leave_one_out",
    "truncated_weights",
    "kl",
]
OTHERS = {
    # shared by several algorithms
    "clipped_gain",
    "compare",
    "gae",
    "length_weighted_mean",
    "reward_to_go",
    "row_mean",
    "row_sum",
    "pass_at_k",  # the best of several responses
    "Turn",  # answers of an environment
    # for the sampler; KL coefficients
    "importance_ratio",
    "masked_weights",
    "rejected_weights",
    "adapted_beta",
    "kl_penalty",
    "stop_penalty",
    # advantages of full responses; choosing tokens
    "geometric_gain",
    "token_covariance",
    "largest_tokens",
    "drawn_tokens",
    "FlowError",
    "PlanError",
    "StageError",  # exceptions that calls raise
    "columns",
    "register_dispatch",  # the table, and custom modes
    "ask",
    "choose",
    "encode",
    "buffer",
    "table",
    "follow",
    "ema",  # what a flow keeps
    "concat",  # rows of rows
    "post",  # for tools and rewards that call a server
    "run",
    "roles",
    "prompt",  # running from Python; the sixth level
}


def test_every_name_that_an_algorithm_needs_is_exported():
    assert set(CONTRACT) | OTHERS == set(rlflow.__all__)


def test_the_list_is_sorted_and_has_each_name_once():
    assert rlflow.__all__ == sorted(
        set(rlflow.__all__), key=lambda name: (not name.isupper(), name[0].islower(), name)
    )


def test_every_name_can_be_imported():
    assert [name for name in rlflow.__all__ if getattr(rlflow, name, None) is None] == []
    assert set(rlflow.__all__) <= set(dir(rlflow))


def test_a_star_import_gives_exactly_the_list():
    namespace = {}
    exec("from rlflow import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(rlflow.__all__)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'lossy'"):
        _ = rlflow.lossy


def test_algorithms_use_only_exported_names():
    files = sorted((ROOT / "algorithms").glob("[!_]*.py"))
    assert files
    for path in files:
        for names in re.findall(r"^from rlflow import (\([^)]+|.+)", path.read_text(), re.MULTILINE):
            assert {name.strip("( \n") for name in names.split(",") if name.strip()} <= set(rlflow.__all__), (
                path
            )


@pytest.mark.slow
def test_names_that_need_torch_load_it_on_first_use():
    script = "import sys, rlflow\nprint('torch' in sys.modules)\nrlflow.whiten\nprint('torch' in sys.modules)"
    assert subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split() == ["False", "True"]
