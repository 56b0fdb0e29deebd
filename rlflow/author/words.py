"""What TRL, verl and OpenRLHF call settings, columns and algorithms, and rlflow's names for them.

Error messages use this to suggest a name when they meet an unknown one.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlflow.errors import nearest

CLIP, MINIBATCH = ("hp.clip", "hp.clip_low + hp.clip_high"), ("hp.minibatch",)
# Word → the flags that it may mean here; the first flag that exists is suggested. ``hp.X``: a setting of the
# flow. ``generate.X``: a setting of roles that sample. ``critic.lr``: a setting of a role of that name.
# ``+``: all of these flags together. An empty tuple: rlflow has nothing that corresponds, and a flag with a
# similar spelling would mean something else.
SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "actor_lr", "optim_lr"), ("lr",)),
    **dict.fromkeys(("critic_learning_rate", "critic_lr"), ("critic.lr",)),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), ("schedule",)),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "num_warmup_steps"), ("warmup",)),
    "adam_beta1": ("beta1",),
    "adam_beta2": ("beta2",),
    "adam_betas": ("beta1 + beta2",),
    "betas": ("beta1 + beta2",),
    "adam_epsilon": ("eps",),
    "adam_eps": ("eps",),
    "wd": ("weight_decay",),
    "l2": ("weight_decay",),
    **dict.fromkeys(
        ("max_norm", "clip_grad", "grad_clip", "grad_norm", "gradient_clipping"), ("max_grad_norm",)
    ),
    **dict.fromkeys(("lora_rank", "lora_r"), ("lora",)),
    "lora_dropout": (),
    "target_modules": ("lora_targets",),
    **dict.fromkeys(
        ("enable_gradient_checkpointing", "activation_checkpointing"), ("gradient_checkpointing",)
    ),
    **dict.fromkeys(
        (
            "micro_batch_size",
            "micro_train_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
        ),
        ("micro_tokens",),
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "mask_truncated_completions"), ()),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size"), ("prompts",)),
    "zero_stage": ("zero",),
    "tensor_parallel_size": ("tensor_parallel",),
    "tensor_model_parallel_size": ("tensor_parallel",),
    **dict.fromkeys(("use_vllm", "vllm_mode"), ("generator",)),
    "vllm_gpu_memory_utilization": ("gpu_memory_utilization",),
    "max_length": (),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size", "batch"), ("prompts",)),
    **dict.fromkeys(
        (
            "steps",
            "max_steps",
            "total_training_steps",
            "iters",
            "iter",
            "num_train_epochs",
            "total_epochs",
            "num_episodes",
            "total_episodes",
        ),
        ("iterations",),
    ),
    **dict.fromkeys(("output_dir", "output", "save_path", "default_local_dir", "ckpt_path"), ("out",)),
    **dict.fromkeys(("run_name", "experiment_name"), ("name",)),
    "project_name": (),
    "resume_from_checkpoint": (),
    **dict.fromkeys(
        ("dataset", "dataset_name", "train_files", "train_file", "prompt_data", "train_dataset"), ("data",)
    ),
    **dict.fromkeys(("model_name_or_path", "model_path", "model_name", "pretrain"), ("model",)),
    "ref_model": ("reference.model",),
    **dict.fromkeys(("report_to", "logger", "use_wandb", "wandb"), ("track",)),
    "logging_steps": (),
    "num_workers": (),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), ("save_every",)),
    "save_total_limit": ("keep",),
    "save_limit": ("keep",),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_freq", "eval_interval"), ("eval_every",)),
    **dict.fromkeys(("val_files", "eval_dataset"), ("eval",)),
    "eval_n_samples_per_prompt": ("eval_samples",),
    **dict.fromkeys(
        (
            "reward_funcs",
            "reward_fn",
            "reward_function",
            "reward_model",
            "custom_reward_function",
            "reward_weights",
        ),
        ("reward",),
    ),
    **dict.fromkeys(("torch_dtype", "precision", "fp16", "bf16", "param_dtype"), ("dtype",)),
    **dict.fromkeys(("gpus", "n_gpus", "num_gpus", "n_gpus_per_node"), ("pools",)),
    "random_seed": ("seed",),
    **dict.fromkeys(
        (
            "num_generations",
            "n_samples",
            "n_samples_per_prompt",
            "group_size",
            "rollout_n",
            "n",
            "num_samples",
            "num_return_sequences",
        ),
        ("hp.samples",),
    ),
    **dict.fromkeys(
        (
            "max_new_tokens",
            "max_completion_length",
            "response_length",
            "max_response_length",
            "generate_max_len",
            "max_gen_len",
        ),
        ("hp.max_tokens",),
    ),
    **dict.fromkeys(
        ("beta", "kl_coef", "init_kl_coef", "kl_loss_coef", "kl_coeff", "kl_beta", "kl_weight"), ("hp.beta",)
    ),
    **dict.fromkeys(("kl_estimator", "kl_loss_type", "kl_penalty"), ("hp.estimator",)),
    "kl_target": ("hp.target_kl",),
    "kl_horizon": ("hp.horizon",),
    **dict.fromkeys(("mini_batch_size", "ppo_mini_batch_size", "per_device_train_batch_size"), MINIBATCH),
    **dict.fromkeys(
        ("epochs", "num_epochs", "ppo_epochs", "num_ppo_epochs", "max_epochs", "num_iterations"),
        ("hp.epochs",),
    ),
    **dict.fromkeys(("cliprange", "clip_ratio", "epsilon", "eps_clip", "clip_eps", "clip_range"), CLIP),
    **dict.fromkeys(("clip_ratio_low", "epsilon_low", "clip_low"), ("hp.clip_low", "hp.clip")),
    **dict.fromkeys(("clip_ratio_high", "epsilon_high", "clip_higher"), ("hp.clip_high",)),
    **dict.fromkeys(("clip_ratio_c", "delta"), ("hp.dual_clip",)),
    "cliprange_value": ("hp.value_clip",),
    **dict.fromkeys(("lambda", "lambd", "gae_lambda"), ("hp.lam",)),
    "discount": ("hp.gamma",),
    **dict.fromkeys(("loss_type", "loss_agg_mode"), ("hp.mean",)),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), ("hp.deviation",)),
    **dict.fromkeys(("critic_warmup", "freezing_actor_steps"), ("hp.warmup",)),
    **dict.fromkeys(
        ("vf_coef", "entropy_coef", "entropy_coeff", "ent_coef", "adv_estimator", "advantage_estimator"), ()
    ),
    **dict.fromkeys(
        ("rollout_is_threshold", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
        ("hp.is_cap",),
    ),
    "use_bias_correction_kl": ("hp.estimator",),
    **dict.fromkeys(("stop_strings", "stop_sequences"), ("generate.stop",)),
    "min_new_tokens": ("generate.min_tokens",),
    **{
        name: (f"data.{name}",)
        for name in ("chat", "system", "template", "max_prompt", "split", "completion", "chosen", "rejected")
    },
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), ("data.max_prompt",)),
    **dict.fromkeys(("max_samples", "train_max_samples", "max_records"), ("data.max_records",)),
    "input_key": ("data.prompt",),
    "prompt_key": ("data.prompt",),
    "label_key": ("data.answer",),
    "answer_key": ("data.answer",),
    "input_template": ("data.template",),
    "system_prompt": ("data.system",),
    "apply_chat_template": ("data.chat",),
    "turns": ("env.turns",),
    "max_turns": ("env.turns",),
}
TEXTS = {  # a row's strings, which rewards read
    **dict.fromkeys(
        ("solution_str", "response", "responses", "completions", "output", "outputs", "generation"),
        "completion",
    ),
    **dict.fromkeys(
        ("ground_truth", "label", "labels", "solution", "target", "gold", "reference_answer"), "answer"
    ),
    **dict.fromkeys(("prompts", "question", "query"), "prompt"),
    "finish_reason": "finish",
}
COLUMNS = {
    **TEXTS,
    **dict.fromkeys(
        ("response_mask", "loss_mask", "action_mask", "completion_mask", "attention_mask"), "mask"
    ),
    **dict.fromkeys(("response_ids", "completion_ids", "input_ids"), "tokens"),
    "prompt_ids": "prompt_tokens",
    **dict.fromkeys(
        (
            "old_log_probs",
            "old_log_prob",
            "old_logprobs",
            "old_per_token_logps",
            "log_probs",
            "action_log_probs",
        ),
        "logprobs",
    ),
    **dict.fromkeys(
        ("ref_log_prob", "ref_log_probs", "ref_per_token_logps", "reference_logprobs"), "ref_logprobs"
    ),
    **dict.fromkeys(("rollout_log_probs", "sampling_per_token_logps"), "sampled_logprobs"),
    **dict.fromkeys(("token_level_scores", "seq_level_rewards", "reward_score"), "scores"),
    **dict.fromkeys(("token_level_rewards",), "rewards"),
    "uid": "group",
    "group_id": "group",
    "rollout_is_weights": "weights",
    "entropys": "entropy",
    "entropies": "entropy",
}
ALGORITHMS = {
    **dict.fromkeys(
        ("reinforce", "reinforce++", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rf++"),
        "reinforce_pp",
    ),
    **dict.fromkeys(("gae", "ppo2"), "ppo"),
    **dict.fromkeys(("dr_grpo", "drgrpo", "group_norm"), "grpo"),
    "geo_mean": "gmpo",
    "rm": "reward_model",
    "reward": "reward_model",
    "gkd": "distill",
    "clipcov": "clip_cov",
}


def column_meant(name: str, columns: Iterable[str]) -> str | None:
    """Return the column that ``name`` probably means, or None if nothing is close.

    Names from other projects are tried first, then names in ``columns`` that are spelled similarly.
    """
    columns = list(columns)
    return known if (known := COLUMNS.get(name)) in columns else nearest(name, columns)


def setting_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the setting in ``known`` that ``name`` probably means, or None if nothing is close."""
    known = list(known)
    last = (flag.rpartition(".")[2] for flag in SETTINGS.get(name, ()))
    return next((each for each in last if each in known), None) or nearest(name, known)


def algorithm_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the algorithm or file in ``known`` that ``name`` probably means, or None if nothing is close."""
    known, word = list(known), name.lower().replace("-", "_")
    return ALGORITHMS[word] if ALGORITHMS.get(word) in known else nearest(name, known)
