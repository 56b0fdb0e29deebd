"""Runs of packaged algorithms on the packaged model, with data and rewards that need only the core package."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlflow
from gpu.ground import ROOT, Ground
from gpu.models import PACKAGED, questions
from rlflow import stage
from rlflow.author.load import load_flow

SETTINGS = {
    "reward": ("task",),
    "lr": 3e-4,
    "beta2": 0.95,
    "held_out": 0,
    "save_every": 0,
    "hp.max_tokens": 8,
}


@stage(gives="scores")
def exact(completion: list[str], answer: list[str]) -> Tensor:
    """Return 1.0 for each exact answer, else 0.0. This reward runs in the process of an eager iteration."""
    return torch.tensor(
        [float(text.strip() == right) for text, right in zip(completion, answer, strict=True)]
    )


def data(ground: Ground) -> Path:
    """Return a file of questions with their answers. The first call writes it."""
    path = ground.folder / "questions.jsonl"
    if not path.exists():
        lines = (
            {"prompt": question, "answer": answer} for question, answer in questions(ground.rows(64, 8000))
        )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(ground: Ground, algorithm: str, device: str, dtype: str, **others: Any) -> dict[str, Any]:
    """Return the settings of a small run, with ``others`` as overrides."""
    own = {"ppo": {"hp.samples": 4, "hp.minibatch": 64}, "grpo": {"hp.samples": 8, "hp.minibatch": 128}}[
        algorithm
    ]
    return {
        "model": str(PACKAGED),
        "data": str(data(ground)),
        "device": device,
        "dtype": dtype,
        "threads": ground.rows(1, min(4, os.cpu_count() or 1)),
        "out": str(ground.folder / "runs"),
        **SETTINGS,
        **own,
        **others,
    }


def run(ground: Ground, algorithm: str, device: str, dtype: str, **others: Any) -> Any:
    """Run an algorithm as `rlflow run algorithms/X.py` does, with ``others`` as overrides of the settings."""
    flow = load_flow(str(ROOT / "algorithms" / f"{algorithm}.py"))
    return rlflow.run(flow, **settings(ground, algorithm, device, dtype, **others))


@dataclass(frozen=True)
class Once:
    """The sampled tokens of one iteration, with their log-probs and the actor's parameters afterwards, by
    name.
    """

    tokens: Tensor
    logprobs: Tensor
    parameters: dict[str, Tensor]


def once(ground: Ground, algorithm: str, device: str, dtype: str) -> Once:
    """Run one iteration eagerly, and return its samples and parameters."""
    flow = load_flow(str(ROOT / "algorithms" / f"{algorithm}.py"))
    roles = rlflow.roles(flow, **settings(ground, algorithm, device, dtype, prompts=ground.rows(4, 32)))
    try:
        taken = roles.take()
        sampled = roles["actor"].generate(taken, samples=4, max_tokens=8)
        rows = roles.prepared.engine.fetch(sampled.select("tokens", "sampled_logprobs"))
        flow(taken, **{**roles, "reward": exact})
        state = roles.prepared.engine.models["actor"].trainer.state()
        kept = {
            name: tensor.detach().cpu().clone()
            for name, tensor in state.items()
            if name.startswith("parameters/")
        }
        return Once(rows.data["tokens"].value, rows.data["sampled_logprobs"].value, kept)
    finally:
        roles.close()


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ in any bit."""
    return [name for name in one if not torch.equal(one[name].cpu(), other[name].cpu())]
