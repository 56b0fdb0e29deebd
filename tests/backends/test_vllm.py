"""The vllm generator beyond the contract, on one rank and on two (``own_vllm.py``)."""

import pytest

from rlflow.backends.vllm import install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm_installed")]
CHECKS = {
    1: (
        "the_process_is_unchanged",
        "unsupported_options_are_refused",
        "a_model_without_kernels_is_refused",
        "an_error_reaches_the_caller_and_the_engine_continues",
        "rows_match_the_local_generator",
        "weights_written_in_place_are_used",
        "new_weights_between_steps_are_recorded_per_token",
        "weights_arrive_during_a_pause_and_no_row_is_lost",
        "weights_that_arrive_during_a_prompt_apply_to_its_response",
        "a_pause_without_end_is_reported_to_the_caller",
    ),
    2: (
        "an_exported_run_loads_and_gives_the_same_scores",
        "adapters_reach_the_engine_merged",
        "ranks_that_share_an_engine_need_equal_calls",
        "ranks_with_their_own_engine_sample_other_rows_or_none",
    ),
}


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=[pytest.mark.long] * (ranks > 1)) for ranks in CHECKS]
)
def test_its_own_checks_pass(checked, subtests, ranks):
    checked.check(subtests, "vllm", ranks, CHECKS[ranks])


def test_the_install_command_keeps_installed_packages(capsys):
    assert install.main() == 0
    assert any(words in capsys.readouterr().out for words in ("is already installed", "the build for GPUs"))
