"""Measure the held-out accuracy of a transformers model with greedy decoding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TOGETHER = 64  # questions in one batch


def accuracy(
    model: Any, tokenizer: Any, file: str, tokens: int, right: Callable[[str, str], float], dtype: torch.dtype
) -> float:
    """Return the share of right answers.

    ``file``: JSON Lines with prompt and answer. ``tokens``: maximum number of tokens in an answer. ``right``:
    scores an answer. ``dtype``: dtype of the computation.
    """
    records = [json.loads(line) for line in Path(file).read_text().splitlines()]
    trains, side = model.training, tokenizer.padding_side
    model.eval()
    tokenizer.padding_side = "left"
    scores: list[float] = []
    for start in range(0, len(records), TOGETHER):
        part = records[start : start + TOGETHER]
        inputs = tokenizer([record["prompt"] for record in part], return_tensors="pt", padding=True)
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            rows = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        answers = tokenizer.batch_decode(rows[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        scores += [right(answer, record["answer"]) for answer, record in zip(answers, part, strict=True)]
    tokenizer.padding_side = side
    model.train(trains)
    return sum(scores) / len(scores)
