"""OpenRLHF's settings (release 0.11.2, Apache-2.0), read from a script that starts
``openrlhf.cli.train_ppo_ray``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlflow.cli.importers import script
from rlflow.cli.importers.imported import Imported, Keys, Pair, Whole
from rlflow.cli.importers.openrlhf_names import GONE, present
from rlflow.errors import PlanError

OF_A_MODEL = {
    "adam.betas": [0.9, 0.95],
    "adam.eps": 1e-8,
    "adam.weight_decay": 0.0,
    "lr_scheduler": "cosine_with_min_lr",
    "max_norm": 1.0,
}
DEFAULTS: dict[str, Any] = {
    **{f"{role}.{name}": value for role in ("actor", "critic") for name, value in OF_A_MODEL.items()},
    "actor.adam.lr": 1e-6,
    "critic.adam.lr": 9e-6,
    "actor.model_name_or_path": None,
    "critic.model_name_or_path": None,
    "reward.model_name_or_path": None,
    "reward.remote_url": None,
    "actor.gradient_checkpointing_enable": False,
    "actor.eps_clip": 0.2,
    "actor.eps_clip_low_high": None,
    "actor.dual_clip": None,
    "critic.value_clip": 0.5,
    "critic.freezing_steps": -1,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "algo.advantage.estimator": "gae",
    "algo.advantage.lambd": 1,
    "algo.advantage.gamma": 1,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_gating": "ratio",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "algo.kl.unbiased_gradient": False,
    "algo.dynamic_filtering_enable": False,
    "reward.overlong_buffer_len": None,
    "reward.overlong_penalty_factor": 1,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.max_new_tokens": None,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.seed": 42,
    "data.max_len": 2048,
    "data.max_samples": 100000000,
    "data.prompt_dataset": None,
    "data.prompt_probs": None,
    "data.prompt_split": "train",
    "data.input_key": "input",
    "data.label_key": None,
    "data.input_template": None,
    "data.apply_chat_template": False,
    "eval.dataset": None,
    "eval.steps": -1,
    "eval.n_samples_per_prompt": 4,
    "ckpt.save_steps": -1,
    "ds.param_dtype": "bf16",
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{
        f"{role}.{name}": values
        for role in ("actor", "critic")
        for name, values in (
            ("optim", ("adam",)),
            ("lr_warmup_ratio", (0.03, 0, 0.0)),
            ("min_lr_ratio", (0.1,)),
        )
    },
    "actor.aux_loss_coef": (0,),
    "actor.entropy_coef": (None, 0),
    "actor.freeze_visual_encoder": (False,),
    "algo.kl.target": (None,),
    "algo.kl.horizon": (10000,),
    "algo.dynamic_filtering_range": ([0, 1], [0.0, 1.0]),
    "reward.normalize_enable": (False,),
    "reward.clip_range": ([-10, 10],),
    "reward.stop_properly_penalty_coef": (None,),
    "train.agent_func_path": (None,),
    "train.async_enable": (False,),
    "train.async_queue_size": (1,),
    "train.partial_rollout_enable": (False,),
    "train.enable_ema": (False,),
    "ds.load_in_4bit": (False,),
    "ds.lora.target_modules": ("all-linear",),
    "ds.lora.dropout": (0,),
    "data.max_images_per_prompt": (0,),
    "rollout.vllm_generate_batch_size": (None,),
    "pretrain_data": (None,),
}
MEANINGLESS = (
    *GONE,
    "*.num_nodes",
    "*.num_gpus_per_node",
    "*.muon.*",
    "vllm.*",
    "logger.*",
    "train.colocate_*",
    "train.micro_batch_size",
    "train.dynamic_batch_enable",
    "train.max_tokens_per_gpu",
    "train.full_determinism_enable",
    "train.ema_beta",
    "rollout.micro_batch_size",
    "rollout.max_tokens_per_gpu",
    "ckpt.[!s]*",
    "ckpt.save_hf",
    "critic.save_value_network",
    "local_rank",
    "use_ms",
    "actor.gradient_checkpointing_reentrant",
    "eval.split",
    "eval.temperature",
    "data.image_key",
    "data.dataloader_num_workers",
    "data.disable_fast_tokenizer",
    "ref.offload",
    "reward.offload",
    *(
        f"ds.{name}"
        for name in (
            "zero_stage",
            "zpg",
            "adam_offload",
            "deepcompile",
            "attn_implementation",
            "experts_implementation",
            "use_*",
            "grad_accum_dtype",
            "overlap_comm",
            "enable_sleep",
            "tensor_parallel_size",
            "packing_samples",
            "value_head_prefix",
            "ring_attn_*",
        )
    ),
)
KINDS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "actor.model_name_or_path",
            "critic.model_name_or_path",
            "reward.model_name_or_path",
            "reward.remote_url",
            "data.prompt_dataset",
            "data.label_key",
            "data.input_template",
            "eval.dataset",
        ),
        str | None,
    ),
    "actor.adam.betas": Pair,
    "critic.adam.betas": Pair,
    "actor.eps_clip_low_high": Pair | None,
    "actor.dual_clip": float | None,
    "reward.overlong_buffer_len": Whole | None,
    "rollout.max_new_tokens": Whole | None,
    "data.prompt_probs": float | str | None,
    "algo.advantage.is_correction_threshold": float | Pair,
    **dict.fromkeys(
        ("algo.advantage.lambd", "algo.advantage.gamma", "reward.overlong_penalty_factor"), float
    ),
}
KEYS = Keys("OpenRLHF", "0.11.2", DEFAULTS, NEUTRAL, MEANINGLESS, KINDS, ("0.10.1",))
PROGRAMS = ("openrlhf.cli.train_ppo_ray",)
FLOWS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}
MEANS = {"token-mean": "tokens", "seq-mean-token-mean": "row-tokens"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine"}
CHARGES = ("ppo", "rloo", "reinforce_pp")


def read(text: str, name: str) -> dict[str, Any]:
    """Return the settings in a script by key, with old keys replaced by current ones.

    ``text``: the script. ``name``: its name in messages. Raises PlanError if the script doesn't start the
    trainer.
    """
    words = script.arguments(text, PROGRAMS, name)
    if words is None:
        raise PlanError.of(
            "import",
            f"'{name}' does not start OpenRLHF's trainer",
            expected=f"a command with {PROGRAMS[0]}",
            remedy="name the script that starts it",
        )
    return script.once(present(_flags(words, name)), name)


def _flags(words: Sequence[str], name: str) -> Iterator[tuple[str, Any]]:
    """Yield (flag, value) for each flag.

    The value is True for a flag without a value, and a list if there are several.
    """
    flags: list[tuple[str, list[Any]]] = []
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            flags.append((key, [script.value(value)] if equals else []))
        elif flags:
            flags[-1][1].append(script.value(word))
        else:
            raise PlanError.of(
                "import",
                f"'{name}': a word of the trainer's command is not a flag",
                found=f"{word:.60}",
                expected="--KEY VALUE",
                remedy="replace it by the flags that it stands for, or remove it",
            )
    return ((key, True if not values else values[0] if len(values) == 1 else values) for key, values in flags)


def imported(source: Mapping[str, Any]) -> Imported:
    """Convert OpenRLHF's settings to rlflow's."""
    settings = Imported(KEYS, source)
    settings.flow = _flow(settings)
    for step in (_data, _rewards, _sampling, _algorithm, _weights, _kl, _optimizers, _run):
        step(settings)
    settings.finish()
    return settings


def _flow(settings: Imported) -> str:
    estimator, loss = settings.value("algo.advantage.estimator"), settings.value("actor.policy_loss_type")
    flow = FLOWS.get(estimator, "")
    if not flow:
        settings.refuse("algo.advantage.estimator", f"rlflow has no algorithm '{estimator}'")
    if loss == "gspo":
        if estimator != "group_norm":
            settings.refuse("actor.policy_loss_type", "rlflow's gspo takes advantages within groups")
        flow = "gspo" if estimator == "group_norm" else flow
    if settings.value("algo.dynamic_filtering_enable", "the algorithm dapo") and flow:
        if flow != "grpo":
            settings.refuse("algo.dynamic_filtering_enable", "rlflow filters groups only with GRPO")
        flow = "dapo" if flow == "grpo" else flow
    for key in ("algo.advantage.estimator", "actor.policy_loss_type"):
        settings.value(key, f"the algorithm {flow}")
    settings.flags |= {"hp.baseline": True} if estimator == "reinforce_baseline" else {}
    if settings.value("algo.advantage.no_std_norm", "--hp.deviation") or estimator == "dr_grpo":
        settings.flags["hp.deviation"] = False
        if flow != "grpo":
            settings.refuse("algo.advantage.no_std_norm", f"{flow} does not have this setting")
    return flow


def _data(settings: Imported) -> None:
    names, shares = (
        _parts(settings.value(f"data.{key}", "--data FILE:WEIGHT"))
        for key in ("prompt_dataset", "prompt_probs")
    )
    settings.flags["data"] = (
        [f"{name}:{share}" for name, share in zip(names, shares, strict=True)]
        if len(shares) == len(names)
        else names
    )
    if (most := settings.value("data.max_samples", "--data.max_records")) != KEYS.defaults[
        "data.max_samples"
    ]:
        settings.flags["data.max_records"] = most
    if not names:
        settings.by_hand.append("--data: the script names no data")
    for key, flag, usual in (
        ("data.input_key", "data.prompt", "input"),
        ("data.label_key", "data.answer", None),
        ("data.input_template", "data.template", None),
        ("data.prompt_split", "data.split", "train"),
    ):
        if settings.value(key, f"--{flag}") != usual:
            settings.take(key, flag, lambda value: str(value).replace("{}", "{prompt}"))
    settings.flags["data.chat"] = bool(settings.value("data.apply_chat_template", "--data.chat"))
    if sets := settings.value("eval.dataset", "--eval"):
        settings.flags |= {"eval": [f"val={sets}"], "held_out": 0}
        settings.take("eval.n_samples_per_prompt", "eval_samples")


def _parts(text: Any) -> list[str]:
    return [part for part in str(text or "").split(",") if part]


def _rewards(settings: Imported) -> None:
    if model := settings.value("reward.model_name_or_path", "--reward"):
        settings.flags["reward"] = [model]
    if url := settings.value("reward.remote_url", "--reward"):
        settings.flags["reward"] = [
            f"{each}:reward_func" if each.endswith(".py") else each for each in str(url).split(",")
        ]


def _sampling(settings: Imported) -> None:
    settings.take("actor.model_name_or_path", "model")
    settings.take("rollout.n_samples_per_prompt", "hp.samples")
    longest, answer = (
        settings.value("data.max_len", "--data.max-prompt"),
        settings.value("rollout.max_new_tokens", "--hp.max_tokens"),
    )
    settings.flags["hp.max_tokens"] = answer or longest
    settings.flags["data.max_prompt"] = longest if not answer or longest <= answer else longest - answer
    if not answer:
        settings.differs["rollout.max_new_tokens"] = (
            "a response may have data.max_len tokens, however long its prompt is"
        )
    for name in ("temperature", "top_p"):
        if settings.value(f"rollout.{name}", f"--actor.generate.{name}") != 1.0:
            settings.take(f"rollout.{name}", f"actor.generate.{name}")


def _algorithm(settings: Imported) -> None:
    settings.take("rollout.batch_size", "prompts")
    settings.take("train.batch_size", "hp.minibatch")
    settings.take("train.max_epochs", "hp.epochs")
    if settings.flow in ("ppo", "reinforce_pp"):
        settings.take("algo.advantage.gamma", "hp.gamma")
    if settings.flow == "ppo":
        settings.take("algo.advantage.lambd", "hp.lam")
        settings.take("critic.value_clip", "hp.value_clip")
        settings.flags["hp.warmup"] = max(0, settings.value("critic.freezing_steps", "--hp.warmup"))
    if settings.flow == "dapo":
        overlong = settings.value("reward.overlong_buffer_len", "--hp.overlong")
        settings.flags |= {
            "hp.groups": settings.value("rollout.batch_size"),
            "hp.overlong": int(overlong or 0),
            "hp.penalty": settings.value("reward.overlong_penalty_factor"),
        }
    elif settings.value("reward.overlong_buffer_len", "--hp.overlong"):
        settings.refuse("reward.overlong_buffer_len", f"{settings.flow} has no penalty for length; dapo has")
    mode = settings.value("actor.loss_agg_mode", "--hp.mean")
    if settings.flow == "grpo":
        settings.flags["hp.mean"] = (
            "constant" if settings.value("algo.advantage.estimator") == "dr_grpo" else MEANS.get(mode, mode)
        )
    elif (
        mode != ("seq-mean-token-mean" if settings.flow == "gspo" else "token-mean")
        or settings.flow == "rloo"
    ):
        settings.refuse("actor.loss_agg_mode", f"{settings.flow} averages the loss in another way")
    _clips(settings)


def _clips(settings: Imported) -> None:
    both = settings.value("actor.eps_clip", "--hp.clip")
    low, high = settings.value("actor.eps_clip_low_high", "--hp.clip_low, --hp.clip_high") or (both, both)
    if settings.flow in ("dapo", "gspo"):
        settings.flags |= {"hp.clip_low": low, "hp.clip_high": high}
    else:
        settings.flags |= {"hp.clip": low} | (
            {"hp.clip_high": high} if settings.flow == "ppo" and high != low else {}
        )
        if settings.flow != "ppo" and high != low:
            settings.refuse(
                "actor.eps_clip_low_high",
                f"{settings.flow} has one clip for both directions; dapo and ppo have two",
            )
    if settings.value("actor.dual_clip", "--hp.dual_clip") and settings.flow in ("ppo", "dapo"):
        settings.take("actor.dual_clip", "hp.dual_clip")
    elif settings.value("actor.dual_clip"):
        settings.refuse("actor.dual_clip", f"{settings.flow} has no dual clip; ppo and dapo have")


def _weights(settings: Imported) -> None:
    level, mode, gate = (
        settings.value(f"algo.advantage.is_correction_{name}", "--hp.is_cap")
        for name in ("level", "mode", "gating")
    )
    bounds = settings.value("algo.advantage.is_correction_threshold", "--hp.is_cap")
    if level == "off":
        settings.differs["algo.advantage.is_correction_level"] = (
            "importance weights between sampler and trainer are always on here, with --hp.is_cap 2.0"
        )
    elif (level, mode, gate) == ("token", "clip", "ratio") and (
        not isinstance(bounds, list) or bounds[0] == 0
    ):
        settings.flags["hp.is_cap"] = bounds[-1] if isinstance(bounds, list) else bounds
    else:
        settings.refuse(
            "algo.advantage.is_correction_level",
            "rlflow only caps the weights; a flow can mask tokens with masked_weights",
        )


def _kl(settings: Imported) -> None:
    beta, in_loss = (
        settings.value("algo.kl.init_coef", "--hp.beta"),
        settings.value("algo.kl.use_loss", "--hp.estimator"),
    )
    kind, unbiased = (
        settings.value("algo.kl.estimator", "--hp.estimator"),
        settings.value("algo.kl.unbiased_gradient", "--hp.estimator"),
    )
    if in_loss and settings.flow == "grpo" and (kind != "k1" or unbiased):
        settings.flags["hp.estimator"] = "k3-weighted" if unbiased else kind
    elif beta and in_loss:
        settings.refuse(
            "algo.kl.use_loss", f"{settings.flow} does not have this KL in its loss; grpo has, with k2 or k3"
        )
    elif beta and (settings.flow not in CHARGES or kind != "k1"):
        settings.refuse(
            "algo.kl.init_coef",
            f"{settings.flow} does not subtract this KL from rewards; ppo, rloo, reinforce_pp do, with k1",
        )
        beta = 0.0
    if settings.flow in (*CHARGES, "grpo"):
        settings.flags["hp.beta"] = beta


def _optimizers(settings: Imported) -> None:
    for role in ("actor", "critic") if settings.flow == "ppo" else ("actor",):
        for name, flag in (
            ("adam.lr", "lr"),
            ("adam.eps", "eps"),
            ("adam.weight_decay", "weight_decay"),
            ("max_norm", "max_grad_norm"),
        ):
            settings.take(f"{role}.{name}", f"{role}.{flag}")
        betas = settings.value(f"{role}.adam.betas", f"--{role}.beta1, beta2")
        kind = settings.value(f"{role}.lr_scheduler", f"--{role}.schedule")
        settings.flags |= {
            f"{role}.beta1": betas[0],
            f"{role}.beta2": betas[1],
            f"{role}.schedule": SCHEDULES.get(kind, "constant"),
        }
        if kind not in SCHEDULES:
            settings.refuse(f"{role}.lr_scheduler", "learning rates here are constant, linear or cosine")
        settings.differs[f"{role}.lr_warmup_ratio"] = (
            f"0.03 of all steps; --{role}.warmup counts steps and is 0 by default"
        )
        if kind == "cosine_with_min_lr":
            settings.differs[f"{role}.min_lr_ratio"] = (
                "the learning rate falls to a tenth; here cosine falls to 0"
            )
    if rank := settings.value("ds.lora.rank", "--lora"):
        settings.flags |= {"lora": rank, "lora_alpha": settings.value("ds.lora.alpha", "--lora-alpha")}
    if settings.value("actor.gradient_checkpointing_enable", "--gradient_checkpointing"):
        settings.flags["gradient_checkpointing"] = True
    if settings.flow == "ppo" and settings.value("critic.model_name_or_path"):
        settings.take("critic.model_name_or_path", "critic.model")


def _run(settings: Imported) -> None:
    episodes = settings.value("train.num_episodes", "--iterations, by hand")
    settings.by_hand.append(
        f"--iterations: {episodes} x records / {settings.flags['prompts']} (train.num_episodes)"
    )
    settings.take("train.seed", "seed")
    dtype = settings.value("ds.param_dtype", "--dtype")
    settings.flags["dtype"] = "bfloat16"
    if dtype != "bf16":
        settings.refuse("ds.param_dtype", "models here are in float32 or bfloat16")
    for key, flag in (("ckpt.save_steps", "save_every"), ("eval.steps", "eval_every")):
        if (every := settings.value(key, f"--{flag.replace('_', '-')}")) > 0:
            settings.flags[flag] = every
