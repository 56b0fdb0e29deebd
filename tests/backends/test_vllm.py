"""What the vllm generator does beside the contract, on one rank and on two (``own_vllm.py``)."""

import pytest

from rlflow.backends.vllm import install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm_installed")]
CHECKS = {
    1: (
        "its_process_is_as_it_was",
        "what_the_engine_cannot_do_is_said",
        "a_model_without_kernels_is_refused",
        "an_error_reaches_the_caller_and_the_engine_goes_on",
        "rows_are_those_of_the_local_generator",
        "what_is_written_in_place_is_sampled_from",
        "weights_that_come_between_steps_are_told_token_by_token",
        "a_pause_lets_weights_in_and_no_row_is_lost",
        "weights_that_come_while_prompts_are_read_are_those_of_what_follows",
        "a_pause_without_end_is_told_to_who_waits",
    ),
    2: (
        "an_exported_run_is_loaded_and_scores_the_same",
        "adapters_reach_the_engine_merged",
        "ranks_that_share_an_engine_are_asked_the_same",
        "ranks_with_an_engine_each_sample_other_rows_or_none",
    ),
}


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=[pytest.mark.long] * (ranks > 1)) for ranks in CHECKS]
)
def test_its_own_checks_hold(judged, subtests, ranks):
    judged.hold(subtests, "vllm", ranks, CHECKS[ranks])


def test_the_install_command_leaves_what_is_there(capsys):
    assert install.main() == 0
    assert any(words in capsys.readouterr().out for words in ("is already installed", "the build for GPUs"))
