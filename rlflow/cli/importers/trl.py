"""TRL's settings (release 1.16.0, Apache-2.0), read from a script that builds a GRPOTrainer, or from a YAML file
for ``trl grpo --config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlflow.cli.importers import script, tree, trl_script
from rlflow.cli.importers.imported import Imported
from rlflow.cli.importers.trl_keys import KEYS
from rlflow.cli.importers.trl_script import OF_TRL, Unread, unread

TRAINED = ("train_dataset", "dataset_name")
# loss, level of the ratio → flow
FLOWS = {
    **dict.fromkeys((("grpo", "token"), ("dapo", "token"), ("bnpo", "token"), ("dr_grpo", "token")), "grpo"),
    ("grpo", "sequence"): "gspo",
    ("cispo", "token"): "cispo",
    ("sapo", "token"): "sapo",
}
MEANS = {"grpo": "row-tokens", "dapo": "tokens", "bnpo": "tokens", "dr_grpo": "constant"}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
TRACKERS = ("tensorboard", "wandb", "mlflow")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def read(text: str, name: str) -> dict[str, Any]:
    """Return the settings in a script or YAML file, by key. ``name``: the file's path.

    Raises PlanError if there are no settings in it.
    """
    if not name.endswith((".yaml", ".yml")):
        return trl_script.read(text, name)
    return {str(key): _plain(value) for key, value in tree.read(text, name).items()}


def _plain(value: Any) -> Any:
    return [script.value(each) for each in value] if isinstance(value, list) else script.value(value)


def imported(source: Mapping[str, Any]) -> Imported:
    """Convert TRL's settings to rlflow's."""
    opaque = unread(source)
    settings = Imported(KEYS, {key: value for key, value in source.items() if key not in opaque})
    for key, value in opaque.items():
        settings.by_hand.append(f"{key} = {value}{_instead(key)}")
    settings.flow = _flow(settings)
    for step in (
        _model,
        _data,
        _rewards,
        _sampling,
        _batches,
        _algorithm,
        _clips,
        _weights,
        _optimizer,
        _run,
    ):
        step(settings)
    settings.finish()
    return settings


def _instead(key: str) -> str:
    default = KEYS.defaults.get(key)
    return f"; this file has TRL's default, {default}" if default is not None else ""


def _flow(settings: Imported) -> str:
    loss, level = (
        settings.value("loss_type", "the algorithm"),
        settings.value("importance_sampling_level", "the algorithm"),
    )
    flow = FLOWS.get((loss, level), "")
    if not flow:
        key = "loss_type" if level == "token" else "importance_sampling_level"
        settings.refuse(key, f"rlflow has no algorithm with the loss '{loss}' and ratios per {level}")
    return flow


def _model(settings: Imported) -> None:
    for key in ("model", "model_name_or_path"):
        settings.take(key, "model")
    if (revision := settings.value("model_revision", "--model NAME@REVISION")) != "main":
        settings.flags["model"] = f"{settings.flags.get('model', '')}@{revision}"
    if "model" not in settings.flags:
        settings.by_hand.append("--model: the file names no model")
    lora = {"r": "lora", "lora_alpha": "lora_alpha", "target_modules": "lora_targets"}
    if "peft_config.r" in settings.source:
        names = {f"peft_config.{key}": flag for key, flag in lora.items()}
    elif settings.value("use_peft", "--lora"):
        names = {"lora_r": "lora", "lora_alpha": "lora_alpha", "lora_target_modules": "lora_targets"}
        if settings.value("lora_dropout", "--lora"):
            settings.refuse("lora_dropout", "adapters here have no dropout")
    else:
        names = {}
    for key, flag in names.items():
        value = settings.value(key, f"--{flag.replace('_', '-')}")
        if flag != "lora_targets":
            settings.flags[flag] = value
        elif value is not None and value != "all-linear":
            if {*value} <= ATTENTION and not isinstance(value, str):
                settings.flags[flag] = "attention"
                settings.differs[key] = "--lora-targets attention adapts all projections of the attention"
            else:
                settings.refuse(key, "adapters here are on all linear layers, or on those of the attention")


def _data(settings: Imported) -> None:
    name, config, split = (
        settings.value(f"dataset_{part}", "--data") for part in ("name", "config", "train_split")
    )
    whole = settings.value("train_dataset", "--data")
    if name:
        whole = f"{name}{f':{config}' if config else ''}/{split}"
    if whole:
        settings.flags["data"] = [whole]
    elif not any(line.startswith("train_dataset") for line in settings.by_hand):
        settings.by_hand.append("--data: the file names no data")
    held_out = settings.value("eval_dataset", "--eval")
    if settings.value("eval_strategy", "--eval-every") != "no" and name:
        held_out = f"{name}{f':{config}' if config else ''}/{settings.value('dataset_test_split', '--eval')}"
    if held_out:
        settings.flags |= {"eval": [f"test={held_out}"], "held_out": 0}
        settings.take("num_generations_eval", "eval_samples")
    settings.take("max_prompt_length", "data.max_prompt")
    if settings.value("max_prompt_length"):
        settings.differs["max_prompt_length"] = "longer prompts are dropped and counted; TRL cuts them"
    if settings.value("chat_template_kwargs", "--data.template_kwargs"):
        settings.take("chat_template_kwargs", "data.template_kwargs", json.dumps)


def _rewards(settings: Imported) -> None:
    given = settings.source.get("reward_funcs") or []
    every = [given] if isinstance(given, str) else list(given)
    model = settings.value("reward_model_name_or_path", "--reward")
    weights = settings.value("reward_weights", "--reward REWARD:WEIGHT") or []
    rewards: list[str] = [model] if model else []
    settings.wrong.pop("reward_funcs", None)
    if every:
        settings.counterparts["reward_funcs"] = "--reward"
    for each in every:
        reward = _reward(each)
        if isinstance(reward, Unread):
            weight = f", weight {weights[len(rewards)]}" if len(weights) > len(rewards) else ""
            settings.by_hand.append(f"--reward: {reward}{weight}")
        rewards.append(reward if isinstance(reward, str) else "")
    if weights and len(weights) != len(rewards):
        settings.refuse("reward_weights", f"{len(weights)} weights for {len(rewards)} rewards")
        weights = []
    named = [
        f"{reward}:{weight}" if weight != 1 else reward
        for reward, weight in zip(rewards, weights or [1.0] * len(rewards), strict=True)
        if reward
    ]
    if named:
        settings.flags["reward"] = named
    elif not every:
        settings.by_hand.append("--reward: the file names no reward; the default compares answers")
    if rewards == ["math"]:  # accuracy_reward compares with this field
        settings.flags["data.answer"] = "solution"
    elif "math" in rewards:
        settings.by_hand.append("--data.answer solution: TRL's accuracy_reward compares with this field")


def _reward(given: Any) -> Any:
    """Return rlflow's reward for one of TRL's, which may be a function's name as a string."""
    if not isinstance(given, str):
        return given
    if given in OF_TRL:
        return OF_TRL[given]
    if given.endswith("_reward") or given.startswith("get_"):
        return Unread(given, 0, "write a function that calls it, --reward FILE.py:FUNCTION")
    module, _, function = given.rpartition(".")
    if module.isidentifier() and function.isidentifier() and "/" not in given and ":" not in given:
        return f"{module}.py:{function}"
    return given


def _sampling(settings: Imported) -> None:
    settings.take("num_generations", "hp.samples")
    settings.take("max_completion_length", "hp.max_tokens")
    for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
        if settings.value(name, f"--actor.generate.{name}") != neutral:
            settings.take(name, f"actor.generate.{name}")
    if settings.value("use_vllm", "--actor.generator"):
        settings.flags["actor.generator"] = "vllm"


def _batches(settings: Imported) -> None:
    """Convert TRL's numbers of rows on one device to rows and prompts of a run on one device."""
    each = settings.value("per_device_train_batch_size", "--hp.minibatch, times gradient_accumulation_steps")
    gathered = settings.value("gradient_accumulation_steps", "--hp.minibatch")
    minibatch = each * gathered
    per = settings.value("steps_per_generation", "--prompts") or gathered
    rows = settings.value("generation_batch_size", "--prompts") or each * per
    settings.flags |= {
        "prompts": max(1, rows // settings.flags["hp.samples"]),
        "hp.minibatch": min(minibatch, rows),
    }
    if rows < minibatch:
        settings.refuse("steps_per_generation", "an optimizer step here uses rows of one generation")
    settings.take("num_iterations", "hp.epochs")
    settings.by_hand.append(
        "--prompts and --hp.minibatch: times the number of processes of accelerate launch"
    )


def _algorithm(settings: Imported) -> None:
    if settings.flow == "grpo":
        settings.flags["hp.mean"] = MEANS[settings.value("loss_type")]
    scale = settings.value("scale_rewards", "--hp.deviation")
    if scale == "batch":
        settings.refuse("scale_rewards", "scores here are divided by the deviation of their group")
    elif settings.flow == "grpo":
        settings.flags["hp.deviation"] = scale not in (False, "none")
    elif scale in (False, "none"):
        settings.refuse("scale_rewards", f"{settings.flow} does not have this setting; grpo has")
    beta, weighted = (
        settings.value("beta", "--hp.beta"),
        settings.value("use_bias_correction_kl", "--hp.estimator"),
    )
    if settings.flow == "grpo":
        settings.flags |= {"hp.beta": beta, "hp.estimator": "k3-weighted" if weighted else "k3"}
    elif beta:
        settings.refuse("beta", f"{settings.flow} has no KL in its loss; grpo has")
    if settings.flow == "sapo":
        settings.take("sapo_temperature_pos", "hp.tau_pos")
        settings.take("sapo_temperature_neg", "hp.tau_neg")
    else:
        for key in ("sapo_temperature_pos", "sapo_temperature_neg"):
            settings.value(key, "the loss sapo only")


def _clips(settings: Imported) -> None:
    low = settings.value("epsilon", "--hp.clip")
    high = settings.value("epsilon_high", "--hp.clip_high") or low
    if settings.flow == "gspo":
        settings.flags |= {"hp.clip_low": low, "hp.clip_high": high}
    elif settings.flow == "cispo" and high >= 1:
        settings.flags["hp.ratio_cap"] = high
    elif settings.flow == "cispo":
        settings.refuse("epsilon_high", "the cap on the ratio of cispo is at least 1")
    elif settings.flow == "grpo":
        settings.flags["hp.clip"] = low
        if high != low:
            settings.refuse(
                "epsilon_high",
                "grpo has one clip for both directions; dapo has two, and also samples until groups differ",
            )
    if settings.value("delta", "--hp.dual_clip"):
        settings.refuse("delta", f"{settings.flow} has no dual clip; ppo and dapo have")


def _weights(settings: Imported) -> None:
    on, mode = (
        settings.value(f"vllm_importance_sampling_{name}", "--hp.is_cap") for name in ("correction", "mode")
    )
    caps = [settings.value(f"vllm_importance_sampling_{name}", "--hp.is_cap") for name in ("cap", "clip_max")]
    if not settings.value("use_vllm") or not on:
        settings.differs["vllm_importance_sampling_correction"] = (
            "importance weights between sampler and trainer are always on here, with --hp.is_cap 2.0"
        )
    elif mode == "token_truncate" and (cap := caps[0] or caps[1]):
        settings.flags["hp.is_cap"] = cap
    else:
        settings.refuse(
            "vllm_importance_sampling_mode",
            "rlflow only caps the weights of tokens; a flow can mask tokens with masked_weights",
        )


def _optimizer(settings: Imported) -> None:
    for key, flag in (
        ("learning_rate", "lr"),
        ("weight_decay", "weight_decay"),
        ("adam_beta1", "beta1"),
        ("adam_beta2", "beta2"),
        ("adam_epsilon", "eps"),
        ("max_grad_norm", "max_grad_norm"),
    ):
        settings.take(key, f"actor.{flag}")
    kind = settings.value("lr_scheduler_type", "--actor.schedule")
    settings.flags["actor.schedule"] = SCHEDULES.get(kind, "constant")
    if kind not in SCHEDULES:
        settings.refuse("lr_scheduler_type", "learning rates here are constant, linear or cosine")
    warmup = settings.value("warmup_steps", "--actor.warmup")
    if warmup >= 1:
        settings.flags["actor.warmup"] = int(warmup)
    elif share := warmup or settings.value("warmup_ratio", "--actor.warmup, by hand"):
        settings.by_hand.append(f"--actor.warmup: {share} x the number of optimizer steps")
    if settings.value("gradient_checkpointing", "--gradient_checkpointing"):
        settings.flags["gradient_checkpointing"] = True
    if settings.value("fp16", "--dtype"):
        settings.refuse("fp16", "models here are in float32 or bfloat16")
    settings.flags["dtype"] = "float32" if settings.value("bf16", "--dtype") is False else "bfloat16"


def _run(settings: Imported) -> None:
    rows, minibatch = (
        settings.flags["prompts"] * settings.flags["hp.samples"],
        settings.flags["hp.minibatch"],
    )
    steps = max(1, rows // minibatch) * settings.flags["hp.epochs"]  # optimizer steps of an iteration
    if (most := settings.value("max_steps", "--iterations")) > 0:
        settings.flags["iterations"] = -(-most // steps)
        settings.value("num_train_epochs", "max_steps takes its place")
    else:
        epochs = settings.value("num_train_epochs", "--iterations, by hand")
        settings.by_hand.append(
            f"--iterations: {epochs:g} x records / {settings.flags['prompts']} (num_train_epochs)"
        )
    for name, flag in (("save", "save_every"), ("eval", "eval_every")):
        kind = settings.value(f"{name}_strategy", f"--{name}-every")
        every = settings.value(f"{name}_steps", f"--{name}-every") or 0
        if kind == "steps" and every >= 1:
            settings.flags[flag] = max(1, int(every) // steps)
        elif kind not in ("no", "steps"):
            settings.by_hand.append(f"--{name}-every: TRL's {name}_strategy is '{kind}'")
    settings.take("save_total_limit", "keep")
    settings.take("output_dir", "out")
    settings.take("run_name", "name")
    settings.take("seed", "seed")
    trackers = settings.value("report_to", "--track")
    names = [trackers] if isinstance(trackers, str) else trackers or []
    if known := [name for name in names if name in TRACKERS]:
        settings.flags["track"] = known
    if others := [name for name in names if name not in (*TRACKERS, "none")]:
        settings.by_hand.append(f"--track: tensorboard, wandb or mlflow in place of {', '.join(others)}")
