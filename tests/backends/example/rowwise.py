"""A backend that computes every row alone: slow, and exact by row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor
from transformers import DynamicCache

from rlflow.author.batch import Batch, Data
from rlflow.author.columns import standard_kind
from rlflow.author.seeds import uniforms
from rlflow.backends.local import Trainer as LocalTrainer
from rlflow.backends.local.endings import ends_of_call, text_stops
from rlflow.backends.local.generator import eos_ids
from rlflow.backends.local.network import load_network
from rlflow.backends.local.room import check_room, longest
from rlflow.backends.local.sampling import draw
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.data.spoken import completions
from rlflow.training.protocols import Capabilities, ModelSpec, Sampling


class Trainer(LocalTrainer):
    """The local trainer with forward passes of one row at a time. Settings, updates and checkpoints are
    inherited."""

    @classmethod
    def capabilities(cls, settings: Any, device: str) -> Capabilities:
        """Return the capabilities of the local trainer, and ``row_exact``: the numbers of a row are bit-equal
        for any other rows in the batch."""
        return replace(super().capabilities(settings, device), row_exact=True)

    def forward(self, batch: Batch, want: tuple[str, ...] | None = None, *, ahead: bool = False) -> Batch:
        rows = []
        for row in range(len(batch)):
            rows.append(super().forward(batch.rows([row]), want))
        if not rows:
            return super().forward(batch, want)
        lengths = batch.data["tokens"].lengths
        columns = {
            name: Data(
                data.kind,
                torch.cat([row.data[name].value for row in rows]),
                lengths if data.lengths is not None else None,
            )
            for name, data in rows[0].data.items()
        }
        return Batch(batch.axis, columns)


class Response(NamedTuple):
    """One sampled row."""

    tokens: list[int]
    logprobs: list[Tensor]
    finish: str  # stop or length


class Generator:
    """Samples one row after another, with a key-value cache per row."""

    @dataclass(frozen=True)
    class Settings:
        prefill: Annotated[int, Ge(1)] = 4096  # tokens of a prompt that one forward pass reads

    def __init__(self, spec: ModelSpec, settings: Any = None) -> None:
        self.spec, self.settings = spec, settings or self.Settings()
        self.network = load_network(
            ModelSpec(spec.folder, "logprobs", False, spec.device, spec.dtype, spec.seed)
        )
        self.tokenizer = load_tokenizer(spec.folder)
        self.eos = eos_ids(spec, self.network, self.tokenizer)
        self.version = 0

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        axis, column = prompts.axis.repeat(sampling.samples), prompts.data["prompt_tokens"]
        if len(seeds) != len(axis):
            raise ValueError(f"generate: found {len(seeds)} seeds, expected one per row: {len(axis)}")
        lengths = column.lengths.tolist()
        check_room(
            lengths,
            sampling.max_tokens,
            longest(self.network.module.config),
            f"the positions of the model in {self.spec.folder}",
        )
        repeated = [prompt for prompt in column.value.split(lengths) for _ in range(sampling.samples)]
        rows = [
            self._response(prompt, own, uniforms([seed], own.max_tokens)[0])
            for prompt, own, seed in zip(repeated, sampling.of_rows(axis.keys), seeds, strict=True)
        ]
        return Batch(
            axis,
            self._columns(rows, sampling) | {"group": Data(standard_kind("group"), axis.keys[:, 0].clone())},
        )

    @torch.no_grad()
    def _response(self, prompt: Tensor, sampling: Sampling, uniform: Tensor) -> Response:
        *before, read = prompt.to(self.network.device)[None].split(self.settings.prefill, dim=1)
        cache = DynamicCache(config=self.network.module.config)
        ends = ends_of_call(self.eos, sampling, self.network.vocabulary)
        stops = text_stops(sampling.stop, self.tokenizer, sampling.skip_special_tokens)
        for part in before:
            self._read(part, cache)
        tokens, logprobs = list[int](), list[Tensor]()
        while len(tokens) < sampling.max_tokens:
            logits = self._read(read, cache)
            barred = torch.tensor(ends) if len(tokens) < sampling.min_tokens else None
            read, logprob = draw(
                logits.float(),
                uniform[len(tokens)][None].to(self.network.device),
                sampling,
                barred,
            )
            read = read[None]
            tokens.append(int(read))
            logprobs.append(logprob[0].cpu())
            # before min_tokens, nothing ends the row
            if tokens[-1] in ends or stops(tokens, len(tokens) - sampling.min_tokens):
                return Response(tokens, logprobs, "stop")
        return Response(tokens, logprobs, "length")

    def _read(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        """Add the next tokens to the cache, and return the logits [1, vocabulary] after the last one."""
        first = cache.get_seq_length()
        positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
        return self.network.logits(self.network.hidden(ids, positions, cache)[:, -1])

    def _columns(self, rows: Sequence[Response], sampling: Sampling) -> dict[str, Data]:
        lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
        tokens = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int64)
        texts = completions(
            self.tokenizer, [row.tokens for row in rows], self.eos, sampling.skip_special_tokens
        )
        values: dict[str, Any] = {
            "tokens": tokens,
            "mask": torch.ones_like(tokens, dtype=torch.bool),
            "policy_version": torch.full_like(tokens, self.version),
            "sampled_logprobs": torch.stack([logprob for row in rows for logprob in row.logprobs])
            if rows
            else torch.zeros(0),
            "completion": tuple(texts),
            "finish": tuple(row.finish for row in rows),
            "temperature": torch.full((len(rows),), sampling.temperature or 1.0),
        }
        of_tokens = ("tokens", "mask", "policy_version", "sampled_logprobs")
        return {
            name: Data(standard_kind(name), value, lengths if name in of_tokens else None)
            for name, value in values.items()
        }

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.network.copy(weights)
        self.version = version

    def sleep(self, *parts: str) -> None:
        """Do nothing: there are no ``movable`` parts."""

    def wake(self, *parts: str) -> None:
        """Do nothing: no part was freed."""
