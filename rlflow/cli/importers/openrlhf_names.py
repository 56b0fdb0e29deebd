"""Old names of OpenRLHF's flags, from before release 0.11.2, with their current names.

Up to 0.10.1, flags had no sections (``--actor_learning_rate``). From 0.10.2 to 0.11.0, flags for importance
weights between sampler and trainer were named differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MOVED = {  # section → names that moved into it without another change
    "actor": "freeze_visual_encoder policy_loss_type aux_loss_coef eps_clip eps_clip_low_high dual_clip",
    "critic": "value_clip save_value_network",
    "algo.advantage": "lambd gamma",
    "reward": "overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef",
    "rollout": "max_new_tokens n_samples_per_prompt temperature top_p vllm_generate_batch_size",
    "train": "num_episodes max_epochs seed enable_ema ema_beta agent_func_path colocate_actor_ref "
    "colocate_critic_reward async_queue_size",
    "data": "max_len max_samples prompt_split input_key label_key input_template apply_chat_template "
    "image_key max_images_per_prompt disable_fast_tokenizer dataloader_num_workers",
    "ckpt": "save_steps best_metric_key",
    "ds": "zero_stage zpg adam_offload deepcompile attn_implementation use_liger_kernel grad_accum_dtype "
    "overlap_comm packing_samples param_dtype load_in_4bit value_head_prefix ring_attn_size",
    "vllm": "enforce_eager enable_prefix_caching",
    "logger": "logging_steps",
}
BELOW = {  # former prefix → present section
    "vllm_": (
        "vllm",
        "num_engines tensor_parallel_size sync_backend sync_with_ray enable_sleep gpu_memory_utilization",
    ),
    "eval_": ("eval", "steps dataset split temperature n_samples_per_prompt"),
    "lora_": ("ds.lora", "rank alpha dropout"),
    "wandb_": ("logger.wandb", "org group project run_name"),
    "kl_": ("algo.kl", "target horizon estimator"),
    **{f"{role}_": (role, "num_nodes num_gpus_per_node") for role in ("actor", "critic", "ref", "reward")},
}
RENAMED = {
    "pretrain": "actor.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "rollout_batch_size": "rollout.batch_size",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "entropy_loss_coef": "actor.entropy_coef",
    "freezing_actor_steps": "critic.freezing_steps",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "colocate_all_models": "train.colocate_all",
    "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "full_determinism": "train.full_determinism_enable",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "target_modules": "ds.lora.target_modules",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "use_wandb": "logger.wandb.key",
    "use_tensorboard": "logger.tensorboard_dir",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
}
TWO = {  # former name → the two present names that replace it
    **{
        name: (f"actor.{now}", f"critic.{now}")
        for name, now in (
            ("max_norm", "max_norm"),
            ("l2", "adam.weight_decay"),
            ("adam_betas", "adam.betas"),
            ("lr_scheduler", "lr_scheduler"),
            ("lr_warmup_ratio", "lr_warmup_ratio"),
        )
    },
    "ref_reward_offload": ("ref.offload", "reward.offload"),
}
FORMER: Mapping[str, tuple[str, ...]] = {
    **{name: (f"{section}.{name}",) for section, names in MOVED.items() for name in names.split()},
    **{
        f"{before}{name}": (f"{section}.{name}",)
        for before, (section, names) in BELOW.items()
        for name in names.split()
    },
    **{name: (now,) for name, now in RENAMED.items()},
    **TWO,
}
GONE = (
    "actor_init_on_gpu",
    "perf",
    "bf16",
    "flash_attn",
    "torch_compile",
    "ptx_coef",
    "pretrain_data_probs",
    "pretrain_split",
)  # former names without a present name; they have no effect here
REPLACED = (
    "prompt_max_len",
    "generate_max_len",
    "algo.advantage.is_correction_enable",
    "algo.advantage.is_correction_type",
)
# former type of importance weights → present level and mode
WEIGHTS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


def present(flags: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the settings under their current names, in the command's order."""
    pairs = [(now, value) for name, value in flags for now in FORMER.get(name, (name,))]
    given = dict(pairs)
    return [pair for pair in pairs if pair[0] not in REPLACED] + [
        *_lengths(given).items(),
        *_weights(given).items(),
    ]


def _lengths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert old length limits to current ones.

    Prompt and response used to have separate limits, 1024 each by default. Now there is one limit for both
    together.
    """
    prompt, answer = given.get("prompt_max_len"), given.get("generate_max_len")
    if prompt is None and answer is None:
        return {}
    prompt, answer = (1024 if length is None else length for length in (prompt, answer))
    both = (
        {}
        if "data.max_len" in given
        else {"data.max_len": prompt + answer if type(prompt) is type(answer) is int else prompt}
    )
    return {"rollout.max_new_tokens": answer, **both}


def _weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the old settings for importance weights (a switch and a type) to the current ones."""
    on, kind = (given.get(f"algo.advantage.is_correction_{name}") for name in ("enable", "type"))
    level, mode = WEIGHTS.get(str(kind or "tis"), (kind, "mask"))
    return (
        {"algo.advantage.is_correction_level": level, "algo.advantage.is_correction_mode": mode} if on else {}
    )
