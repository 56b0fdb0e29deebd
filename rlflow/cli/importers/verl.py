"""verl's settings (release 0.9.1, Apache-2.0), read from a script that starts ``verl.trainer.main_ppo`` or
from a YAML file with its configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlflow.cli.importers import script, tree
from rlflow.cli.importers.imported import Imported
from rlflow.cli.importers.verl_keys import ACTOR, DEFAULTS, KEYS, KWARGS, MODEL, OPTIM, ROLLOUT
from rlflow.errors import PlanError

PROGRAMS = ("verl.trainer.main_ppo",)
FLOWS = {
    ("gae", "vanilla"): "ppo",
    ("grpo", "vanilla"): "grpo",
    ("grpo", "gspo"): "gspo",
    ("grpo", "geo_mean"): "gmpo",
    ("rloo", "vanilla"): "rloo",
    ("remax", "vanilla"): "remax",
    ("reinforce_plus_plus", "vanilla"): "reinforce_pp",
    ("reinforce_plus_plus_baseline", "vanilla"): "reinforce_pp",
}
MEANS = {
    "ppo": "token-mean",
    "dapo": "token-mean",
    "reinforce_pp": "token-mean",
    "gspo": "seq-mean-token-mean",
    "gmpo": "seq-mean-token-mean",
    "rloo": "seq-mean-token-sum-norm",
    "remax": "seq-mean-token-sum-norm",
}
OF_GRPO = {"token-mean": "tokens", "seq-mean-token-mean": "row-tokens", "seq-mean-token-sum-norm": "constant"}
# verl's "+" variant uses the gradient of k2
ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "low_var_kl+": "k2", "k3+": "k2"}
TWO_CLIPS, CHARGES = ("dapo", "gspo", "gmpo"), ("ppo", "rloo", "remax", "reinforce_pp")
LINKED = re.compile(r"\$\{(?:oc\.select:\s*)?([\w.]+)(?:\s*,\s*([^{}]*))?\}")


def read(text: str, name: str) -> dict[str, Any]:
    """Return the settings in a script or YAML file, by key. ``name``: the file's name.

    Raises PlanError if there are no settings in it.
    """
    if name.endswith((".yaml", ".yml")):
        texts = script.once(_leaves(tree.read(text, name)), name)
    else:
        words = script.arguments(text, PROGRAMS, name)
        if words is None:
            raise PlanError.of(
                "import",
                f"'{name}' does not start verl's trainer",
                expected=f"a command with {PROGRAMS[0]}, or a .yaml",
                remedy="name the script that starts it",
            )
        texts = script.once((_override(word, name) for word in words), name)
    return {key: _linked(value, texts) for key, value in texts.items()}


def _override(word: str, name: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals:
        raise PlanError.of(
            "import",
            f"'{name}': a word of the trainer's command is not a setting",
            found=f"{word:.60}",
            expected="KEY=VALUE",
            remedy="replace it by the settings that it stands for, or remove it",
        )
    return key.lstrip("+"), script.value(text)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield (
                f"{prefix}{name}",
                [script.value(each) for each in value] if isinstance(value, list) else script.value(value),
            )


def _linked(value: Any, texts: Mapping[str, Any], depth: int = 4) -> Any:
    """Resolve ``${KEY}`` or ``${oc.select:KEY,DEFAULT}``. Other values are returned unchanged.

    ``texts``: the values of all keys. ``depth``: how many references to follow at most.
    """
    match = LINKED.fullmatch(value) if isinstance(value, str) else None
    if match is None or not depth:
        return value
    return _linked(
        texts.get(match[1], DEFAULTS.get(match[1], script.value(match[2]) if match[2] else value)),
        texts,
        depth - 1,
    )


def imported(source: Mapping[str, Any]) -> Imported:
    """Convert verl's settings to rlflow's."""
    settings = Imported(KEYS, _with_template_variables(source))
    settings.flow = _flow(settings)
    for step in (_data, _sampling, _algorithm, _clips, _kl, _optimizers, _run):
        step(settings)
    settings.finish()
    return settings


def _with_template_variables(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with all variables for the chat template in one mapping.

    In verl, each of them has a key of its own.
    """
    own = {
        key.removeprefix(f"{KWARGS}."): value for key, value in source.items() if key.startswith(f"{KWARGS}.")
    }
    rest = {key: value for key, value in source.items() if key != KWARGS and not key.startswith(f"{KWARGS}.")}
    variables = {**_mapping(source.get(KWARGS)), **own}
    return {**rest, KWARGS: variables} if variables or KWARGS in source else rest


def _mapping(value: Any) -> dict[str, Any]:
    """Return a mapping, which may be written as on the command line: {a: 1, b: true}."""
    if not isinstance(value, str):
        return dict(value or {})
    entries = (part.partition(":") for part in value.strip("{} ").split(",") if part.strip())
    return {name.strip().strip("\"'"): script.value(text) for name, _, text in entries}


def _flow(settings: Imported) -> str:
    estimator, mode = (
        settings.value("algorithm.adv_estimator"),
        settings.value(f"{ACTOR}.policy_loss.loss_mode"),
    )
    flow = FLOWS.get((estimator, mode), "")
    if not flow:
        settings.refuse(
            "algorithm.adv_estimator" if mode == "vanilla" else f"{ACTOR}.policy_loss.loss_mode",
            f"rlflow has no algorithm '{estimator}' with the loss '{mode}'",
        )
    if settings.value("algorithm.filter_groups.enable", "samples until enough groups are mixed") and flow:
        if flow != "grpo":
            settings.refuse("algorithm.filter_groups.enable", "rlflow filters groups only with GRPO")
        flow = "dapo" if flow == "grpo" else flow
    for key in ("algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"):
        settings.value(key, f"the algorithm {flow}")
    if estimator == "reinforce_plus_plus_baseline":
        settings.flags["hp.baseline"] = True
    return flow


def _data(settings: Imported) -> None:
    files = settings.value("data.train_files", "--data")
    settings.flags["data"] = files if isinstance(files, list) else [files]
    if (most := settings.value("data.train_max_samples", "by hand")) != -1:
        settings.by_hand.append(f"--data.max_records {most}: the first records; verl draws them at random")
    sets = settings.value("data.val_files", "--eval")
    sets = sets if isinstance(sets, list) else [sets]
    settings.flags["eval"] = [
        f"val{number + 1 if len(sets) > 1 else ''}={file}" for number, file in enumerate(sets)
    ]
    settings.flags["held_out"] = 0
    if settings.value("data.prompt_key", "--data.prompt") != "prompt":
        settings.take("data.prompt_key", "data.prompt")
    settings.take("data.max_prompt_length", "data.max_prompt")
    if settings.value(KWARGS, "--data.template_kwargs"):
        settings.take(KWARGS, "data.template_kwargs", json.dumps)
    settings.take("data.train_batch_size", "prompts")
    settings.take("data.seed", "seed")
    for where in ("reward.custom_reward_function", "custom_reward_function"):
        if path := settings.value(f"{where}.path", "--reward"):
            settings.flags["reward"] = [
                f"{path}:{settings.value(f'{where}.name', '--reward') or 'compute_score'}"
            ]
    if "reward" not in settings.flags:
        settings.by_hand.append(
            "--reward: verl chooses a reward by data_source; here the default compares answers; or use "
            "--reward math or FILE.py:compute_score"
        )


def _sampling(settings: Imported) -> None:
    settings.take(f"{MODEL}.path", "model")
    settings.take(f"{ROLLOUT}.n", "hp.samples")
    settings.take("data.max_response_length", "hp.max_tokens")
    for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", -1)):
        if settings.value(f"{ROLLOUT}.{name}", f"--actor.generate.{name}") != neutral:
            settings.take(f"{ROLLOUT}.{name}", f"actor.generate.{name}")
    settings.take(f"{ROLLOUT}.val_kwargs.n", "eval_samples")


def _algorithm(settings: Imported) -> None:
    prompts = settings.value(
        f"{ACTOR}.ppo_mini_batch_size", "--hp.minibatch, which counts rows: times rollout.n"
    )
    settings.flags["hp.minibatch"] = prompts * settings.value(f"{ROLLOUT}.n", "--hp.samples")
    settings.take(f"{ACTOR}.ppo_epochs", "hp.epochs")
    if settings.flow == "ppo":
        _same_for_both(settings)
    if settings.flow in ("ppo", "reinforce_pp", "remax"):
        settings.take("algorithm.gamma", "hp.gamma")
    if settings.flow == "ppo":
        settings.take("algorithm.lam", "hp.lam")
        settings.take("trainer.critic_warmup", "hp.warmup")
        settings.take("critic.cliprange_value", "hp.value_clip")
    if settings.flow == "grpo":
        settings.take("algorithm.norm_adv_by_std_in_grpo", "hp.deviation")
    elif not settings.value("algorithm.norm_adv_by_std_in_grpo", "the algorithm"):
        settings.refuse("algorithm.norm_adv_by_std_in_grpo", f"{settings.flow} does not have this setting")
    if settings.flow == "dapo":
        settings.flags |= {"hp.groups": settings.value("data.train_batch_size"), "hp.overlong": 0}
        if tries := settings.value("algorithm.filter_groups.max_num_gen_batches", "--hp.tries"):
            settings.flags["hp.tries"] = tries
    mode = settings.value(
        f"{ACTOR}.loss_agg_mode", "--hp.mean" if settings.flow == "grpo" else "the algorithm"
    )
    if settings.flow == "grpo" and mode in OF_GRPO:
        settings.flags["hp.mean"] = OF_GRPO[mode]
    elif mode != MEANS.get(settings.flow):
        settings.refuse(f"{ACTOR}.loss_agg_mode", f"{settings.flow} averages with {MEANS.get(settings.flow)}")
    _weights(settings)


def _same_for_both(settings: Imported) -> None:
    """Refuse settings that differ between actor and critic.

    In rlflow, both train on the same minibatches, for the same number of epochs, with the same kind of
    average.
    """
    for name in ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode"):
        actor, key = settings.value(f"{ACTOR}.{name}"), f"critic.{name}"
        if key in settings.source and settings.value(key, f"as {ACTOR}.{name}") != actor:
            settings.refuse(key, f"it always equals {ACTOR}.{name} here")


def _weights(settings: Imported) -> None:
    kind = settings.value("algorithm.rollout_correction.rollout_is", "--hp.is_cap")
    if kind == "token":
        settings.take("algorithm.rollout_correction.rollout_is_threshold", "hp.is_cap")
    elif kind is None:
        settings.refuse(
            "algorithm.rollout_correction.rollout_is",
            "importance weights between sampler and trainer are always on here, with --hp.is_cap 2.0",
        )
    else:
        settings.refuse("algorithm.rollout_correction.rollout_is", "importance weights here are per token")


def _clips(settings: Imported) -> None:
    """Set the clip flags from verl's clip_ratio_low and clip_ratio_high.

    Both default to 0.2. If either is null, verl uses clip_ratio instead.
    """
    both = settings.value(f"{ACTOR}.clip_ratio", "used if clip_ratio_low or clip_ratio_high is null")
    ends = [settings.value(f"{ACTOR}.clip_ratio_{end}", "--hp.clip") for end in ("low", "high")]
    low, high = (both if end is None else end for end in ends)
    if settings.flow in TWO_CLIPS:
        settings.flags |= {"hp.clip_low": low, "hp.clip_high": high}
    else:
        settings.flags["hp.clip"] = low
    if settings.flow == "ppo" and high != low:
        settings.flags["hp.clip_high"] = high
    elif settings.flow not in (*TWO_CLIPS, "ppo") and high != low:
        settings.refuse(
            f"{ACTOR}.clip_ratio_high",
            f"{settings.flow} has one clip for both directions; dapo and ppo have two",
        )
    if settings.flow in ("ppo", "dapo"):
        settings.take(f"{ACTOR}.clip_ratio_c", "hp.dual_clip")
    else:
        settings.refuse(f"{ACTOR}.clip_ratio_c", f"{settings.flow} has no dual clip; ppo and dapo have")


def _kl(settings: Imported) -> None:
    in_loss, charged = (
        settings.value(f"{ACTOR}.use_kl_loss", "--hp.beta"),
        settings.value("algorithm.use_kl_in_reward", "--hp.beta"),
    )
    beta = 0.0
    if in_loss and settings.flow == "grpo":
        beta = settings.value(f"{ACTOR}.kl_loss_coef", "--hp.beta")
        if (kind := settings.value(f"{ACTOR}.kl_loss_type", "--hp.estimator")) in ESTIMATORS:
            settings.flags["hp.estimator"] = ESTIMATORS[kind]
        else:
            settings.refuse(
                f"{ACTOR}.kl_loss_type", "the gradient of this estimator is not the gradient of the KL"
            )
    elif in_loss:
        settings.refuse(f"{ACTOR}.use_kl_loss", f"{settings.flow} has no KL in its loss; grpo has")
    if charged and settings.flow in CHARGES:
        beta = settings.value("algorithm.kl_ctrl.kl_coef", "--hp.beta")
        for key, wanted in (("algorithm.kl_penalty", ("kl", "k1")), ("algorithm.kl_ctrl.type", ("fixed",))):
            if settings.value(key, "--hp.beta") not in wanted:
                settings.refuse(key, f"{settings.flow} subtracts the KL with {wanted[0]}")
    elif charged:
        settings.refuse(
            "algorithm.use_kl_in_reward",
            f"{settings.flow} does not subtract a KL from rewards; ppo, rloo, remax and reinforce_pp do",
        )
    if settings.flow in (*CHARGES, "grpo"):
        settings.flags["hp.beta"] = beta


def _optimizers(settings: Imported) -> None:
    for role, section in (("actor", ACTOR), *((("critic", "critic"),) if settings.flow == "ppo" else ())):
        for name, flag in OPTIM.items():
            if name != "optim.lr_warmup_steps" or settings.value(f"{section}.{name}", f"--{role}.{flag}") > 0:
                settings.take(f"{section}.{name}", f"{role}.{flag}")
        betas = settings.value(f"{section}.optim.betas", f"--{role}.beta1, beta2")
        settings.flags |= {f"{role}.beta1": betas[0], f"{role}.beta2": betas[1]}
    if rank := settings.value(f"{MODEL}.lora_rank", "--lora"):
        settings.flags |= {"lora": rank, "lora_alpha": settings.value(f"{MODEL}.lora_alpha", "--lora-alpha")}
    settings.take(f"{MODEL}.enable_gradient_checkpointing", "gradient_checkpointing")
    if settings.flow == "ppo" and "critic.model.path" in settings.source:
        settings.take("critic.model.path", "critic.model")


def _run(settings: Imported) -> None:
    dtype = settings.value(f"{ACTOR}.fsdp_config.dtype", "--dtype")
    settings.flags["dtype"] = {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype)
    if steps := settings.value("trainer.total_training_steps", "--iterations"):
        settings.flags["iterations"] = steps
    else:
        epochs = settings.value("trainer.total_epochs", "--iterations, by hand")
        settings.by_hand.append(
            f"--iterations: {epochs} x records / {settings.flags['prompts']} (trainer.total_epochs)"
        )
    for key, flag in (("trainer.save_freq", "save_every"), ("trainer.test_freq", "eval_every")):
        if (every := settings.value(key, f"--{flag.replace('_', '-')}")) > 0:
            settings.flags[flag] = every
    ranks = settings.value("trainer.nnodes", "--pools, by hand") * settings.value(
        "trainer.n_gpus_per_node", "--pools, by hand"
    )
    settings.by_hand.append(
        f"--pools all={ranks} for the same number of GPUs, with --actor.trainer fsdp --actor.generator vllm"
    )
