"""Compare the speed of sampling, log-probs and an update with hand-written Hugging Face code.

Speeds are in tokens per second and as a share of the device's peak.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu.check import Check, at_least, measured, untested
from gpu.ground import Ground
from gpu.models import model, random_prompts, sampled
from gpu.objective import surrogate
from rlflow.backends.local import Generator, Trainer
from rlflow.training import pretrained
from rlflow.training.protocols import ModelSpec, Sampling

SLOWER = 0.8  # minimum speed relative to hand-written code
FEW = 1000  # with fewer tokens, the time is too short to be checked against a bound
SAMPLES = 4
# tokens in a micro-batch, for rlflow and by hand; by hand, the logits of all of them exist at once
TOKENS = 4096
# operations per parameter and token: a multiplication and an addition, forward (and twice as many backward)
PASSES = {"sampling": 2, "log-probs": 2, "update": 6}


def checks(ground: Ground, shape: str) -> Iterator[Check]:
    folder, work = model(ground, shape), Work.of(ground)
    top = peak(ground)
    yield measured("peak of a matrix product, bfloat16", top / 1e12, "TFLOP/s")
    ours, rows, size = sampling(ground, folder, work)
    yield measured("parameters", size / 1e9, "billion")
    yield from rates("sampling", ours, by_hand_sampling(ground, folder, work), work.new, size, top)
    mine, theirs = training(ground, folder, rows), by_hand_training(ground, folder, rows)
    for name in mine:
        yield from rates(name, mine[name], theirs.get(name), tokens_of(rows), size, top)


class Work:
    """Prompts, and the number of tokens to sample for each row."""

    def __init__(self, batch: Any, tokens: int) -> None:
        self.batch, self.tokens, self.rows = batch, tokens, SAMPLES * len(batch)

    @staticmethod
    def of(ground: Ground) -> Work:
        return Work(
            random_prompts(ground.rows(2, 64), *((3, 6) if ground.small else (32, 64))), ground.rows(4, 128)
        )

    @property
    def new(self) -> int:
        """Total number of sampled tokens."""
        return self.rows * self.tokens


Found = tuple[float, int]  # seconds, and peak bytes


def rates(
    name: str, ours: Found, theirs: Found | None, tokens: int, size: int, top: float
) -> Iterator[Check]:
    """Yield the checks for one part of an iteration: tokens per second, and speed relative to hand-written
    code.

    ``ours`` and ``theirs``: (seconds, peak bytes) of rlflow and of the hand-written code; None if the latter
    ran out of memory. ``size``: number of parameters. ``top``: the device's peak operations per second.
    """
    seconds, memory = ours
    share = PASSES[name] * size * tokens / seconds / top
    yield measured(
        f"{name}: tokens per second",
        tokens / seconds,
        why=f"{share:.1%} of the peak, peak memory {memory / 2**30:.1f} GiB",
    )
    if theirs is None:
        yield untested(f"{name} by hand", "it does not fit into the device's memory")
        return
    yield measured(
        f"{name} by hand: tokens per second",
        tokens / theirs[0],
        why=f"peak memory {theirs[1] / 2**30:.1f} GiB",
    )
    speed = f"{name}: speed relative to hand-written code", theirs[0] / seconds
    yield at_least(*speed, SLOWER) if tokens > FEW else measured(*speed, why="too few tokens for a bound")


def peak(ground: Ground) -> float:
    """Return the operations per second of a large matrix product."""
    side = ground.rows(256, 8192)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=ground.device) for _ in range(2))
    return 2 * side**3 * 10 / ground.seconds(lambda: [a @ b for _ in range(10)])


def timed(ground: Ground, call: Callable[[], object]) -> Found:
    """Return (seconds, peak bytes) of a call."""
    seconds = ground.seconds(call, ground.rows(1, 2))
    return seconds, ground.peak(call) if ground.gpu else 0


def tokens_of(rows: Any) -> int:
    """Return the number of tokens in rows, including prompts."""
    return int(rows.data["tokens"].lengths.sum() + rows.data["prompt_tokens"].lengths.sum())


# -- rlflow
# ------------------------------------------------------------------------------------------------------------


def sampling(ground: Ground, folder: Path, work: Work) -> tuple[Found, Any, int]:
    """Measure sampling. Returns (seconds and peak bytes, sampled rows for training, number of parameters)."""
    generator = Generator(ModelSpec(folder, device=ground.device, dtype="bfloat16"))
    generator.eos = []  # so all rows have the same length
    found = timed(
        ground, lambda: generator.generate(work.batch, Sampling(SAMPLES, work.tokens), range(work.rows))
    )
    rows = sampled(generator, work.batch, SAMPLES, work.tokens)
    return found, rows, sum(tensor.numel() for _, tensor in generator.network.tensors())


def training(ground: Ground, folder: Path, rows: Any) -> dict[str, Found]:
    """Measure the time and memory of rlflow's log-probs and update."""
    ground.free()
    trainer = Trainer(
        ModelSpec(folder, trained=True, device=ground.device, dtype="bfloat16"),
        Trainer.Settings(micro_tokens=TOKENS),
    )
    return {
        "log-probs": timed(ground, lambda: trainer.forward(rows)),
        "update": timed(ground, lambda: trainer.update(rows, surrogate)),
    }


# -- by hand
# ------------------------------------------------------------------------------------------------------------


def model_of(ground: Ground, folder: Path, dtype: torch.dtype) -> Any:
    """Load a model with Hugging Face."""
    ground.free()
    return pretrained.read_model(AutoModelForCausalLM, folder, dtype=dtype).to(ground.device).eval()


def by_hand_sampling(ground: Ground, folder: Path, work: Work) -> Found:
    """Measure the time and memory of sampling with Hugging Face."""
    model = model_of(ground, folder, torch.bfloat16)
    prompts = work.batch.data["prompt_tokens"]
    pieces = [piece for piece in prompts.value.split(prompts.lengths.tolist()) for _ in range(SAMPLES)]
    ids = torch.nn.utils.rnn.pad_sequence([piece.flip(0) for piece in pieces], batch_first=True).flip(1)
    lengths = torch.tensor([len(piece) for piece in pieces])
    mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long()
    inputs = {"input_ids": ids.to(ground.device), "attention_mask": mask.to(ground.device)}
    return timed(
        ground,
        lambda: model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            min_new_tokens=work.tokens,
            max_new_tokens=work.tokens,
        ),
    )


def sequences(ground: Ground, rows: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Split rows into micro-batches as the trainer does.

    Returns (token ids, row lengths, prompt lengths) for each micro-batch.
    """
    prompt, tokens = (rows.data[name] for name in ("prompt_tokens", "tokens"))
    pairs = zip(
        prompt.value.split(prompt.lengths.tolist()), tokens.value.split(tokens.lengths.tolist()), strict=True
    )
    whole = sorted(((torch.cat(pair), len(pair[0])) for pair in pairs), key=lambda pair: -len(pair[0]))
    count = max(TOKENS // len(whole[0][0]), 1)
    parts = [whole[start : start + count] for start in range(0, len(whole), count)]
    return [
        (
            torch.nn.utils.rnn.pad_sequence([ids for ids, _ in part], batch_first=True).to(ground.device),
            torch.tensor([len(ids) for ids, _ in part], device=ground.device),
            torch.tensor([before for _, before in part], device=ground.device),
        )
        for part in parts
    ]


def scored(model: Any, ids: torch.Tensor, lengths: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the sum of all responses' log-probs, divided by the number of rows.

    ``ids``: padded rows. ``lengths``: tokens of each row. ``before``: tokens of each prompt.
    """
    logits = model(ids, use_cache=False).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    at = torch.arange(1, ids.shape[1], device=ids.device)
    return torch.where((at >= before[:, None]) & (at < lengths[:, None]), logprobs, 0.0).sum() / len(ids)


def by_hand_training(ground: Ground, folder: Path, rows: Any) -> dict[str, Found]:
    """Measure the time and memory of log-probs and an update in hand-written code.

    Omits a measurement that runs out of memory.
    """
    model, parts = model_of(ground, folder, torch.float32), sequences(ground, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def log_probs() -> None:
        with torch.no_grad(), torch.autocast(ground.device, torch.bfloat16):
            for part in parts:
                float(scored(model, *part))

    def update() -> None:
        for part in parts:
            with torch.autocast(ground.device, torch.bfloat16):
                loss = scored(model, *part)
            (loss / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found = {}
    with contextlib.suppress(torch.OutOfMemoryError):
        found["log-probs"] = timed(ground, log_probs)
        found["update"] = timed(ground, update)
    return found
