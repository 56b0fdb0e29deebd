"""Proposals for unknown flags, columns and algorithms: for misspellings and for names of TRL, verl and
OpenRLHF.
"""

import pytest

from rlflow import FlowError
from rlflow.author.load import load_flow
from rlflow.author.methods import GENERATE, UPDATE, unknown_setting
from rlflow.cli.check import check_flow, roles_of
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.roles.bound import bind_roles
from rlflow.errors import PlanError

SHORT = {
    "samples": "hp.samples",
    "beta": "hp.beta",
    "clip": "hp.clip",
    "epochs": "hp.epochs",
    "minibatch": "hp.minibatch",
    "max_tokens": "hp.max_tokens",
}
# a flag that grpo does not have → the proposal, or None if each similar flag does something else
GRPO = {
    # settings of the flow without their hp. prefix, and misspelt
    **{name: f"--{flag}" for name, flag in SHORT.items()},
    "sampels": "--hp.samples",
    "minbatch": "--hp.minibatch",
    "epocs": "--hp.epochs",
    "estimater": "--hp.estimator",
    "max_token": "--hp.max_tokens",
    "bta": "--hp.beta",
    # of `generate`
    "temperature": "--actor.generate.temperature",
    "temprature": "--actor.generate.temperature",
    "top_p": "--actor.generate.top_p",
    "topk": "--actor.generate.top_k",
    "stop": "--actor.generate.stop",
    "min_new_tokens": "--actor.generate.min_tokens",
    # of the run and of roles, misspelt
    "promts": "--prompts",
    "itertions": "--iterations",
    "save_evry": "--save-every",
    "staleness_": "--staleness",
    "learning_rte": "--lr",
    "weigth_decay": "--weight-decay",
    "warmpu": "--warmup",
    "micro_token": "--micro-tokens",
    "batch_token": "--batch-tokens",
    # of TRL
    "num_generations": "--hp.samples",
    "num_iterations": "--hp.epochs",
    "max_completion_length": "--hp.max_tokens",
    "epsilon": "--hp.clip",
    "num_train_epochs": "--iterations",
    "learning_rate": "--lr",
    "lr_scheduler_type": "--schedule",
    "output_dir": "--out",
    "reward_funcs": "--reward",
    "model_name_or_path": "--model",
    "scale_rewards": "--hp.deviation",
    "loss_type": "--hp.mean",
    "max_prompt_length": "--data.max_prompt",
    "report_to": "--track",
    "save_steps": "--save-every",
    "lora_dropout": None,
    "gradient_accumulation_steps": None,
    "steps_per_generation": "--prompts",
    "generation_batch_size": "--prompts",
    "per_device_train_batch_size": "--hp.minibatch",
    "epsilon_high": None,
    "use_vllm": "--generator",
    "vllm_mode": "--generator",
    "mask_truncated_completions": None,
    "reward_weights": "--reward",
    "use_bias_correction_kl": "--hp.estimator",
    "vllm_importance_sampling_clip_max": "--hp.is_cap",
    "logging_steps": None,
    "adam_beta2": "--beta2",
    # of verl and OpenRLHF
    "kl_coef": "--hp.beta",
    "rollout_n": "--hp.samples",
    "n_samples_per_prompt": "--hp.samples",
    "init_kl_coef": "--hp.beta",
    "ppo_mini_batch_size": "--hp.minibatch",
    "entropy_coeff": None,
    "train_files": "--data",
    "val_files": "--eval",
    "eps_clip": "--hp.clip",
    "rollout_batch_size": "--prompts",
    "generate_max_len": "--hp.max_tokens",
    "clip_ratio_high": None,
    "gae_lambda": None,
    "prompt_max_len": "--data.max_prompt",
    "target_modules": "--lora-targets",
    "zzz": None,
}


def proposed(flow, flag):
    with pytest.raises(PlanError) as caught:
        check_flow(flow, [f"--{flag}", "1"])
    (problem,) = caught.value.problems
    assert (problem.nearest or "--help") in problem.remedy
    return problem.nearest


def test_each_misspelt_or_foreign_name_gets_one_proposal():
    assert len(GRPO) >= 60
    assert {name: proposed("grpo", name) for name in GRPO} == GRPO


@pytest.mark.parametrize(
    ("flow", "flag", "meant"),
    [
        ("dapo", "beta", None),
        ("dapo", "clip_ratio", "--hp.clip_low and --hp.clip_high"),
        ("dapo", "epsilon_high", "--hp.clip_high"),
        ("ppo", "gae_lambda", "--hp.lam"),
        ("ppo", "critic_learning_rate", "--critic.lr"),
        ("ppo", "critic_warmup", "--hp.warmup"),
        ("grpo", "actor.temperature", "--actor.generate.temperature"),
        ("grpo", "reference.temperature", None),
        ("grpo", "actor.learning_rate", "--actor.lr"),
        ("grpo", "actor.kl_coef", "--hp.beta"),
        ("grpo", "hp.kl_coef", "--hp.beta"),
        ("grpo", "hp.temperature", "--actor.generate.temperature"),
        ("grpo", "hp.lr", None),
        ("grpo", "hp.prompts", "--prompts"),
        ("grpo", "acter.lr", "--actor.lr"),
        ("grpo", "actor.trainer.warmpu", "--actor.trainer.warmup"),
        ("grpo", "algorithm.kl_ctrl.kl_coef", "--hp.beta"),
        ("grpo", "actor_rollout_ref.rollout.n", "--hp.samples"),
        ("debate", "temperature", "--one.generate.temperature and --other.generate.temperature"),
    ],
)
def test_a_proposal_names_only_flags_of_this_flow(flow, flag, meant):
    assert proposed(flow, flag) == meant


def test_a_run_proposes_the_same_as_check():
    flow = load_flow("grpo")
    config = sort_values({"backend": "null", "temperature": "1"}, roles_of(flow, ()), flow.parameters.hp)
    with pytest.raises(PlanError) as caught:
        bind_roles(compile_flow(flow).graph, config)
    assert [problem.nearest for problem in caught.value.problems] == ["--actor.generate.temperature"]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("num_generations", GENERATE, "samples"),
        ("max_new_tokens", GENERATE, "max_tokens"),
        ("temprature", GENERATE, "temperature"),
        ("num_iterations", UPDATE, "epochs"),
        ("mini_batch_size", UPDATE, "minibatch"),
        ("loss_agg_mode", UPDATE, "mean"),
        ("lr", UPDATE, None),
    ],
)
def test_foreign_names_of_call_settings_are_known(name, known, meant):
    assert unknown_setting("actor.generate", name, known, None).nearest == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gpro", "grpo"),
        ("gsop", "gspo"),
        ("GRPO2", "grpo"),
        ("reinforce++", "reinforce_pp"),
        ("dr-grpo", "grpo"),
        ("reward-model", "reward_model"),
        ("banana", None),
    ],
)
def test_an_algorithm_is_proposed_by_spelling_or_other_name(written, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as caught:
        load_flow(written)
    assert caught.value.problems[0].nearest == meant


FLOW = """
from rlflow import flow, loss, stage

@stage(gives="advantages")
def weigh(scores, {column}):
    return scores[:, None] * {column}

@loss
def gain(new, advantages):
    return -new.logprobs * advantages, {{}}

@flow
def own(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= weigh(batch)
    actor.update(batch, gain)
"""


@pytest.mark.parametrize(
    ("column", "meant", "remedy"),
    [
        ("response_mask", "mask", "read 'mask'"),
        ("old_log_probs", None, "read 'logprobs', which is its name in rlflow"),
        ("token_level_scores", "scores", "read 'scores'"),
        ("rollout_log_probs", "sampled_logprobs", "read 'sampled_logprobs'"),
        ("maks", "mask", "read 'mask'"),
    ],
)
def test_foreign_names_of_columns_are_known(column, meant, remedy, tmp_path):
    file = tmp_path / f"own_{column}.py"
    file.write_text(FLOW.format(column=column))
    with pytest.raises(FlowError) as caught:
        compile_flow(load_flow(str(file)))
    problem = next(problem for problem in caught.value.problems if problem.code == "missing-column")
    assert problem.nearest == meant
    assert remedy in problem.remedy
