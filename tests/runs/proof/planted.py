"""Faults found in real issue threads, planted into a copy of an algorithm or into a backend, each with the
claim or problem that must name it."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlflow.author.batch import Batch, Data
from rlflow.backends import local
from rlflow.training.learning import OptimizerStep

GAIN = "return charge - weights * clipped_gain(ratio, advantages, clip, clip)"
PPO_GAIN = "return -weights * clipped_gain(ratio, advantages, clip, high, dual)"

FILES = {  # fault: (algorithm, text, replacement, claim that names it)
    "a gradient that is exactly zero": ("grpo", GAIN, f"{GAIN} * 0", "reward-unreached"),
    "a model whose log-probs are detached": (
        "grpo",
        "ratio = (new.logprobs - logprobs).exp()",
        "ratio = (new.logprobs.detach() - logprobs).exp() + 0 * new.logprobs",
        "reward-unreached",
    ),
    "a loss that reads no advantage": ("grpo", GAIN, "return charge - weights * ratio", "reward-unreached"),
    "advantages rolled by a row": (
        "grpo",
        GAIN,
        GAIN.replace("advantages", "advantages.roll(1, 0)"),
        "reward-direction",
    ),
    "advantages of another group": (
        "grpo",
        GAIN,
        GAIN.replace("advantages", "advantages.roll(8, 0)"),
        "reward-place",
    ),
    "advantages in reverse order": (
        "grpo",
        GAIN,
        GAIN.replace("advantages", "advantages.flip(0)"),
        "reward-place",
    ),
    "a sign that is turned": ("grpo", "charge - weights", "charge + weights", "reward-direction"),
    "weights that are read and not used": ("grpo", "charge - weights *", "charge -", "columns"),
    "an average over the padding": (
        "grpo",
        "ratio = (new.logprobs - logprobs).exp()",
        (
            "ratio = (new.logprobs - logprobs - (advantages - advantages.detach()).sum(1, True)).exp()"
            " + 1e-3 * advantages.mean(1, True)"
        ),
        "padding",
    ),
    "values that flee the returns": ("ppo", "square if huber", "-square if huber", "values-direction"),
    "a critic that learns its own values": (
        "ppo",
        "error = torch.max((new.values - returns).abs(), (near - returns).abs())",
        "error = (new.values - values.roll(1, 0)).abs()",
        "columns",
    ),
    "a reward on other rows": (
        "ppo",
        "return place_last(scores, mask)",
        "return place_last(scores.roll(3, 0), mask)",
        "reward-place",
    ),
    "a reward whose price is paid": (
        "ppo",
        "return place_last(scores, mask)",
        "return -place_last(scores, mask)",
        "reward-direction",
    ),
    "a policy that makes good rows unlikely": (
        "ppo",
        PPO_GAIN,
        PPO_GAIN.replace("-weights", "weights"),
        "reward-direction",
    ),
    "the rejected response preferred": (
        "dpo",
        "gap = margin[::2] - margin[1::2]",
        "gap = margin[1::2] - margin[::2]",
        "chosen-direction",
    ),
    "a likelihood that is minimised": (
        "sft",
        "return -new.logprobs",
        "return new.logprobs",
        "given-direction",
    ),
}


class Deaf(local.Generator):
    """A sampler that ignores new weights."""

    def receive(self, weights, version):
        super().receive(iter(list(dict(self.network.tensors()).items())), version)


class Merged(local.Trainer):
    """A trainer that exports its initial weights, as if adapters were never merged."""

    def __init__(self, spec, settings=None):
        super().__init__(spec, settings) if settings is not None else super().__init__(spec)
        self.begun = {name: tensor.detach().clone() for name, tensor in self.network.tensors()}

    def weights(self):
        yield from self.begun.items()

    def pieces(self):
        return None


class Hot(local.Generator):
    """A sampler that reports log-probs at temperature 1, whatever its sampling temperature is."""

    def generate(self, prompts, sampling, seeds):
        rows = super().generate(prompts, sampling, seeds)
        cold = super().generate(prompts, replace(sampling, temperature=1.0), seeds)
        data = cold.data if sampling.temperature != 1.0 else rows.data
        temperature = replace(
            data["temperature"], value=torch.full_like(data["temperature"].value, sampling.temperature)
        )
        return Batch(rows.axis if data is rows.data else cold.axis, {**data, "temperature": temperature})


class Shifted(local.Generator):
    """A sampler whose log-probs are those of the previous token."""

    def generate(self, prompts, sampling, seeds):
        rows = super().generate(prompts, sampling, seeds)
        told = rows.data["sampled_logprobs"]
        return Batch(
            rows.axis, {**rows.data, "sampled_logprobs": Data(told.kind, told.value.roll(1), told.lengths)}
        )


class Still(local.Trainer):
    """A trainer that reports steps without making them."""

    def step(self):
        self.optimizer.zero_grad()
        self.cached.drop()
        self.steps += 1
        return OptimizerStep(True, 1.0, 0.0)


class Upward(local.Trainer):
    """A trainer that climbs its objective instead of descending."""

    def backward(self, objective):
        (-objective).backward()


class LastPass(local.Trainer):
    """A trainer that keeps only the gradient of the last micro-batch."""

    def backward(self, objective):
        self.optimizer.zero_grad()
        objective.backward()


class Frozen(local.Trainer):
    """A trainer with one matrix that gets no gradient."""

    def step(self):
        self.network.parameters()["model.layers.0.self_attn.q_proj.weight"].grad = None
        return super().step()


class Follows(local.Trainer):
    """A reference that changes with the actor."""

    actor = None

    def __init__(self, spec, settings=None):
        super().__init__(spec, settings) if settings is not None else super().__init__(spec)
        if spec.trained:
            Follows.actor = self

    def forward(self, batch, want=None, *, ahead=False):
        own = Follows.actor if not self.spec.trained and Follows.actor is not None else self
        return local.Trainer.forward(own, batch, want, ahead=ahead)


class Unmoved(local.Trainer):
    """A trainer that shows copies of its weights, which therefore follow nothing."""

    def masters(self):
        return ((name, tensor.clone()) for name, tensor in super().masters())


BACKENDS = {  # fault: (algorithm, settings, side, class, claim that names it)
    "a sampler that no weights reach": ("grpo", {}, "generator", Deaf, "sampler-follows"),
    "adapters that never reach the sampler": ("grpo", {}, "trainer", Merged, "sampler-follows"),
    "a temperature that is not applied": ("grpo", {}, "generator", Hot, "sampler"),
    "log-probs of the token before": ("grpo", {}, "generator", Shifted, "sampler"),
    "a trainer that takes no step": ("grpo", {}, "trainer", Still, "weights-move"),
    "a trainer that climbs": ("grpo", {}, "trainer", Upward, "weights-direction"),
    "micro-batches that are forgotten": ("grpo", {}, "trainer", LastPass, "micro-batches"),
    "a matrix without gradient": ("grpo", {}, "trainer", Frozen, "parameters"),
    "a reference that follows the actor": ("grpo", {"hp.beta": 0.1}, "every_trainer", Follows, "frozen"),
    "a reference that does not follow": ("prorl", {"hp.samples": 4}, "every_trainer", Unmoved, "follows"),
}
