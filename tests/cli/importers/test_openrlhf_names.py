"""Old names of OpenRLHF's flags lead to their current names, and to the same configuration."""

from pathlib import Path

import pytest

from rlflow.cli.importers import openrlhf
from rlflow.cli.importers.openrlhf_names import GONE, present

FIXTURES = Path(__file__).parent / "fixtures"
FLAGS = (FIXTURES / "openrlhf-0.11.2-flags.txt").read_text().split()
FLAT = (FIXTURES / "openrlhf-0.10.1-flags.txt").read_text().split()


def imported_from(words):
    return openrlhf.imported(openrlhf.read(f"python3 -m openrlhf.cli.train_ppo_ray {words}", "run.sh"))


def test_each_flag_without_a_section_has_current_names():
    given = {now for flag in FLAT for now in dict(present([(flag, "x")]))}
    assert {flag for flag in given if len(openrlhf.KEYS.lists(flag)) != 1} == set()
    assert given - {*FLAGS, *GONE} == set()


SAME = (
    (
        (
            "--pretrain M --prompt_data a.jsonl --actor_learning_rate 5e-7 --max_norm 0.5 --l2 0.01 "
            "--n_samples_per_prompt 4 --max_len 2048 --use_kl_loss --kl_estimator k3 --init_kl_coef 0.02 "
            "--advantage_estimator group_norm --eval_steps 10 --remote_rm_url http://a:5/r"
        ),
        (
            "--actor.model_name_or_path M --data.prompt_dataset a.jsonl --actor.adam.lr 5e-7 --actor.max_norm "
            "0.5 --actor.adam.weight_decay 0.01 --rollout.n_samples_per_prompt 4 --data.max_len 2048 "
            "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.02 --algo.advantage.estimator "
            "group_norm --eval.steps 10 --reward.remote_url http://a:5/r"
        ),
    ),
    ("--prompt_max_len 512 --generate_max_len 1536", "--data.max_len 2048 --rollout.max_new_tokens 1536"),
    ("--generate_max_len 256", "--data.max_len 1280 --rollout.max_new_tokens 256"),
    (
        "--enable_vllm_is_correction --vllm_is_truncated_threshold 0 5.0",
        (
            "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip "
            "--algo.advantage.is_correction_threshold 0 5.0"
        ),
    ),
    (
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis",
        "--algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode mask",
    ),
    ("--vllm_is_correction_type icepop", ""),
)


@pytest.mark.parametrize(("before", "now"), SAME)
def test_names_of_earlier_releases_give_the_same_configuration(before, now):
    one, other = imported_from(before), imported_from(now)
    assert (one.flow, one.flags, one.unsupported.keys()) == (
        other.flow,
        other.flags,
        other.unsupported.keys(),
    )
