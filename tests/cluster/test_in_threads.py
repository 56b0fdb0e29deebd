"""Runs with threads as ranks end as expected if a rank fails, hangs or cannot load."""

import re
import threading
from pathlib import Path

import pytest

import rlflow
import rlflow.data.tasks
from rlflow import PlanError, StageError

MODEL = f"{next(iter(rlflow.data.tasks.__path__))}/arithmetic_model"
ONE_FAILS = """
import threading
import torch
from rlflow import flow, loss, stage

first = threading.Lock()

@stage(gives="advantages")
def spread(scores, mask):
    return torch.where(mask, scores[:, None], 0.0)

@loss
def unlucky(new, advantages):
    if threading.current_thread().name == "model" and first.acquire(blocking=False):
        raise LookupError("of one rank alone")
    return -new.logprobs * advantages, {}

@flow
def learn(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= spread(batch)
    actor.update(batch, unlucky)
"""


def test_a_failing_rank_is_named_and_waiting_ranks_end(tmp_path):
    (tmp_path / "learn.py").write_text(ONE_FAILS)
    before = set(threading.enumerate())
    roles = rlflow.roles(
        str(tmp_path / "learn.py"), model=MODEL, data="chain_sum", prompts=4, pools="all=3@threads", threads=1
    )
    prepared = roles.prepared
    try:
        with pytest.raises(StageError, match=r"LookupError: of one rank alone \(rank \d of pool 'all'\)"):
            prepared.executor.run(prepared.plan, prepared.prompts.take(4))
        ranks = {thread for thread in threading.enumerate() if thread.name == "model"} - before
    finally:
        roles.close()
    assert len(ranks) >= 3
    assert not any(thread.is_alive() for thread in ranks)


CANNOT = """
from dataclasses import replace

from rlflow.backends import local

Generator = local.Generator


class Trainer(local.Trainer):
    @classmethod
    def capabilities(cls, settings, device):
        return replace(super().capabilities(settings, device), threads=True)

    def __init__(self, *given):
        raise MemoryError("too large")
"""


def test_a_rank_that_cannot_load_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "too_large").mkdir()
    (tmp_path / "too_large" / "trainer.py").write_text(CANNOT)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(threading.enumerate())
    with pytest.raises(
        PlanError,
        match=r"(?s)a rank could not load its models.*MemoryError: too large \(rank \d of pool 'all'\)",
    ):
        rlflow.roles(
            "grpo",
            model=MODEL,
            data="chain_sum",
            prompts=4,
            pools="all=2@threads",
            **{"actor.trainer": "too_large.trainer", "hp.max_tokens": 4},
        )
    assert set(threading.enumerate()) <= before


HANGS = """
import time
import torch
from rlflow import flow, loss, row, stage

@stage(gives={"extra": row(torch.float32)}, timeout=1)
def hangs(scores):
    time.sleep(3600)

@loss
def likelihood(new, extra: row(torch.float32)):
    return -new.logprobs * extra[:, None], {}

@flow
def hanging(prompts, actor, reward):
    batch = actor.generate(prompts, max_tokens=4)
    batch |= reward(batch)
    batch |= hangs(batch)
    actor.update(batch, likelihood)
"""


@pytest.mark.slow
def test_a_run_with_hanging_ranks_exits(tmp_path, launch):
    (tmp_path / "hanging.py").write_text(HANGS)
    process = launch("hanging.py", backend="null", pools="all=2@threads", prompts=4, iterations=1, held_out=0)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert re.search("no answer to 'stage' from rank 0 of pool 'all', rank 1 of pool 'all' after 1 s", said)
    assert Path(tmp_path / "runs").exists()
