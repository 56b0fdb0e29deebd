"""Compare an iteration of GRPO with TRL's GRPOTrainer: the same model, prompts, samples, tokens and optimizer
step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.check import Check, holds, measured
from gpu.ground import Ground
from gpu.models import model, questions
from gpu.runs import run

SAMPLES, WARM, TIMED = 4, 1, 3


def checks(ground: Ground) -> Iterator[Check]:
    folder, prompts, tokens = model(ground, "0.6b"), ground.rows(2, 16), ground.rows(4, 128)
    ours = rlflow_seconds(ground, folder, prompts, tokens)
    yield measured("rlflow: seconds per iteration", statistics.median(ours[WARM:]), "s")
    theirs, sampled = trl_seconds(ground, folder, prompts, tokens)
    yield measured("TRL: seconds per iteration", statistics.median(theirs[WARM:]), "s")
    yield measured(
        "rlflow's speed relative to TRL", statistics.median(theirs[WARM:]) / statistics.median(ours[WARM:])
    )
    yield holds(
        "TRL sampled the same number of tokens",
        set(sampled) == {prompts * SAMPLES * tokens},
        str(set(sampled)),
    )


def rlflow_seconds(ground: Ground, folder: Path, prompts: int, tokens: int) -> list[float]:
    """Return the seconds of each of rlflow's iterations."""
    import json

    ended = run(
        ground,
        "grpo",
        ground.device,
        "bfloat16",
        model=str(folder),
        prompts=prompts,
        iterations=WARM + TIMED,
        **{"hp.samples": SAMPLES, "hp.max_tokens": tokens, "hp.minibatch": prompts * SAMPLES},
    )
    lines = [json.loads(line) for line in (ended.folder / "metrics.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines if "seconds" in line]


def trl_seconds(ground: Ground, folder: Path, prompts: int, tokens: int) -> tuple[list[float], list[int]]:
    """Return (seconds of each iteration, number of tokens that each iteration sampled) for TRL."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sampled: list[int] = []
    marks: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.append(sum(map(len, completion_ids)))
        return [float(len(completion) % 2) for completion in completions]

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ground.settle()
            marks.append(time.perf_counter())

        on_train_begin = on_step_end

    config = GRPOConfig(
        output_dir=str(ground.folder / "trl"),
        max_steps=WARM + TIMED,
        use_cpu=not ground.gpu,
        bf16=ground.gpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=prompts * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=tokens,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    texts = Dataset.from_list([{"prompt": question} for question, _ in questions(prompts * (WARM + TIMED))])
    GRPOTrainer(str(folder), reward, config, texts, callbacks=[Marks()]).train()
    return [after - before for before, after in itertools.pairwise(marks)], sampled
