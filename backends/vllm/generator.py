"""A generator that samples with vLLM 0.32."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, group_column
from rlflow.author.columns import TABLE, Kind, Level
from rlflow.backends.local.endings import ends_of_call, eos_of, text_stops
from rlflow.backends.local.room import check_room, positions
from rlflow.backends.local.room import longest as room_of
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.backends.vllm.settings import GeneratorSettings
from rlflow.backends.vllm.vllm_engine import CPU_CACHE, Row, VllmEngine, ended_in_order, whole
from rlflow.data.spoken import completions
from rlflow.errors import PlanError
from rlflow.training import pretrained
from rlflow.training.chunks import chunked
from rlflow.training.protocols import Capabilities, ModelSpec, Sampling
from rlflow.training.weight_sync.layout import Spread
from rlflow.training.weight_sync.proof import Destinations, prove
from rlflow.training.weight_sync.trace import trace


def token_column(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Data:
    """Make a token column from the values of each row's tokens."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    flat = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)
    return Data(Kind(Level.TOKEN, str(dtype).removeprefix("torch.")), flat, lengths)


def batch_of(
    axis: Axis, rows: Sequence[Row], sampling: Sampling, eos: Sequence[int], tokenizer: Any
) -> Batch:
    """Return sampled rows as a batch on ``axis``.

    Its columns are tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version and group.
    """
    columns = {
        "tokens": token_column([row.tokens for row in rows], torch.int64),
        "mask": token_column([[True] * len(row.tokens) for row in rows], torch.bool),
        "sampled_logprobs": token_column([row.logprobs for row in rows]),
        "policy_version": token_column([row.versions for row in rows], torch.int64),
    }
    responses = completions(tokenizer, [row.tokens for row in rows], eos, sampling.skip_special_tokens)
    columns |= {
        "completion": Data(Kind(Level.TEXT), tuple(responses)),
        "finish": Data(Kind(Level.TEXT), tuple("stop" if row.stopped else "length" for row in rows)),
        "temperature": Data(TABLE["temperature"].kind, torch.full((len(rows),), sampling.temperature or 1.0)),
        "group": group_column(axis),
    }
    return Batch(axis, columns)


PAUSE_SECONDS = 600.0
TAGS = {"weights": "weights", "cache": "kv_cache"}  # vLLM's names
COLDEST = 0.01  # the lowest temperature above 0 that vLLM samples at; it silently raises lower ones to this
HOTTEST = 2.0  # vLLM refuses higher temperatures


class Generator:
    """Samples responses with vLLM, using the weights last passed to ``receive``.

    If ``tensor_parallel`` is greater than 1, that many neighbouring ranks share an engine, and rlflow calls
    them with the same rows. Each group of ranks has an engine of its own, and engines may sample at different
    times.
    """

    Settings = GeneratorSettings

    def __init__(self, spec: ModelSpec, settings: GeneratorSettings | None = None) -> None:
        self.spec, self.settings = spec, settings or GeneratorSettings()
        assert spec.folder is not None
        self.tokenizer = load_tokenizer(spec.folder)
        self.asleep: set[str] = set()
        generation, config = _configs(spec.folder)
        self.positions = positions(config)
        self.engine = VllmEngine(spec, same_rotary(config, spec, self.settings), config.architectures or ())
        check_rotary(config, spec, self.engine.longest)
        self.eos = eos_of(
            spec, (generation, config, config.get_text_config()), self.engine.vocabulary, self.tokenizer
        )

    @classmethod
    def capabilities(cls, settings: GeneratorSettings, device: str) -> Capabilities:
        """Return the generator's capabilities. Parts of its memory can be freed only on a GPU and with
        ``sleep_mode``."""
        return Capabilities(
            tensor=settings.tensor_parallel,
            float64=False,
            movable=tuple(TAGS) if settings.sleep_mode and device != "cpu" else (),
            temperatures=(COLDEST, HOTTEST),
            longest=settings.max_model_len,
            # 0 means the rest of the engine's share of a GPU
            cache_bytes=settings.kv_cache_memory_bytes or (CPU_CACHE if device == "cpu" else 0),
        )

    @property
    def version(self) -> int:
        """The version of the weights, as given to ``receive`` or ``writing``."""
        return self.engine.version

    @property
    def module(self) -> nn.Module:
        """This rank's part of vLLM's live model."""
        return self.engine.module

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        """Sample ``sampling.samples`` responses to each prompt. ``seeds`` has one number per response.

        Returns tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version and group on
        the axis ``prompts.axis.repeat(samples)``, without the columns of the prompts.

        A row's tokens are determined by its prompt, its seed and the weights. Other rows affect them only
        through rounding in matrix products. If another thread calls ``receive`` during sampling,
        ``policy_version`` shows which tokens were sampled before and after. Raises PlanError if a row doesn't
        fit, ValueError for other invalid arguments, and any error that ends the engine.
        """
        axis, drawing = self._drawn(prompts, sampling, seeds)
        return batch_of(axis, whole(drawing), sampling, self.eos, self.tokenizer)

    def generate_chunks(
        self, prompts: Batch, sampling: Sampling, seeds: Sequence[int], chunks: int
    ) -> Iterator[Batch]:
        """Yield the rows of ``generate`` in ``chunks`` batches, each as soon as all its rows have ended.

        At most ``max_num_seqs`` rows are sampled at once. The first ``max_num_seqs`` rows are yielded first,
        then the next ones, and so on. Among these, shorter rows come first. Rows of equal length are ordered
        by how they ended (those that ended by themselves come first) and then by number.
        """
        axis, drawing = self._drawn(prompts, sampling, seeds)
        drawn: Sequence[Row] = ()

        def ended() -> Iterator[Tensor]:
            nonlocal drawn
            yielded = 0
            for drawn in drawing:
                order = ended_in_order(drawn, self.settings.max_num_seqs)
                yield torch.tensor(order[yielded:], dtype=torch.int64)
                yielded = len(order)

        for rows in chunked(ended(), len(axis), chunks):
            own = [drawn[row] for row in rows.tolist()]
            yield batch_of(axis.take(rows), own, sampling, self.eos, self.tokenizer)

    def _drawn(
        self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]
    ) -> tuple[Axis, Iterator[Sequence[Row]]]:
        """Return the axis of the rows to sample, and an iterator that samples them, yielding all rows each
        time a few have ended."""
        axis = prompts.axis.repeat(sampling.samples)
        pieces = prompts.data["prompt_tokens"].lists()
        self._check(pieces, sampling, len(axis), len(seeds))
        pieces = [piece for piece in pieces for _ in range(sampling.samples)]
        self._check_peers((pieces, sampling, list(seeds)))
        stops = text_stops(
            () if sampling.lengths else sampling.stop, self.tokenizer, sampling.skip_special_tokens
        )
        ends = ends_of_call(self.eos, sampling, self.engine.vocabulary)
        return axis, self.engine.sample(
            pieces,
            sampling.of_rows(axis.keys),
            seeds,
            ends,
            lambda tokens: stops(tokens, len(tokens) - sampling.min_tokens),
        )

    def logprobs(self, batch: Batch) -> Batch:
        """Return the column ``logprobs`` for ``tokens`` following ``prompt_tokens``, at temperature 1 under
        the generator's weights."""
        prompts, tokens = batch.data["prompt_tokens"].lists(), batch.data["tokens"].lists()
        whole = [prompt + row for prompt, row in zip(prompts, tokens, strict=True)]
        self._check(whole, Sampling(max_tokens=1), len(batch), len(batch))
        self._check_peers(whole)
        scored = self.engine.score(whole)
        return Batch(
            batch.axis,
            {
                "logprobs": token_column(
                    [row[len(row) - len(own) :] for row, own in zip(scored, tokens, strict=True)]
                )
            },
        )

    def _check_peers(self, call: Any) -> None:
        """Raise ValueError if the ranks of an engine were called with different rows. They take every step
        together, so they would wait for each other forever."""
        if not self.engine.seat.alike(call):
            raise ValueError(
                "generate: found different rows on ranks that share an engine, expected the same rows on "
                f"each of {self.engine.seat.size} (tensor_parallel)"
            )

    def _check(self, prompts: list[list[int]], sampling: Sampling, rows: int, seeds: int) -> None:
        if seeds != rows:
            raise ValueError(f"generate: found {seeds} seeds, expected one per row: {rows}")
        if sampling.temperature and not COLDEST <= sampling.temperature <= HOTTEST:
            raise ValueError(
                f"temperature: found {sampling.temperature}, expected 0, or from {COLDEST} to {HOTTEST}, "
                "the range of vLLM"
            )
        check_room(
            [len(prompt) for prompt in prompts], sampling.max_tokens, self.engine.longest, *self._limit()
        )

    def _limit(self) -> tuple[str, str]:
        """Return two strings for an error message: what limits the length of a row, and a remedy besides
        shorter rows."""
        if self.positions is not None and self.engine.longest >= self.positions:
            return f"the positions of the model in {self.spec.folder}", ""
        return (
            "the limit that max_model_len and the key-value cache set",
            ", or a larger --ROLE.max_model_len or --ROLE.kv_cache_memory_bytes",
        )

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights in place.

        weights: (Hugging Face name, complete tensor) pairs, from which each rank takes its part. version: how
        many updates the new weights contain. Raises ValueError if a name is unknown or missing, or if a shape
        doesn't fit.

        Another thread may call this during sampling. Unfinished rows then continue with the new weights but
        the old keys and values, which ``resume`` can recompute.
        """
        with self.writing(version):
            self.load(weights)

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load weights with vLLM's own loader, leaving the version as it is."""
        self.engine.load(weights)

    def destinations(self, tensors: Mapping[str, Spread]) -> Destinations:
        """Return this rank's memory for each of these tensors, as traced from vLLM's own loader and proved
        bit for bit.

        This overwrites the weights with test patterns, so write new weights before sampling.
        """
        return prove(self.module, trace(self.module, tensors), tensors, self.load)

    def writing(self, version: int) -> AbstractContextManager[None]:
        """Block sampling while a ``with`` block writes into the parameters of ``module``. When the block
        ends, the weights have this version."""
        return self.engine.writing(version)

    def pause(self, seconds: float = PAUSE_SECONDS) -> None:
        """Stop sampling until ``resume``. Call this from another thread during sampling; unfinished rows are
        kept.

        If the pause lasts longer than ``seconds``, the waiting calls raise TimeoutError. Raises ValueError if
        several ranks share the engine, because such an engine takes new weights only between two calls.
        """
        self.engine.pause(seconds)

    def resume(self, recompute: bool = False) -> None:
        """Continue sampling after ``pause``.

        With ``recompute``, the keys and values of unfinished rows are recomputed with the current weights, so
        later tokens depend on these weights alone. Otherwise, the old keys and values are kept.
        """
        self.engine.resume(recompute)

    def healthy(self) -> bool:
        """Return True if a test token can be sampled. If the engine fails, its error is raised."""
        return self.engine.answers()

    def sleep(self, *parts: str, keep: bool = True) -> None:
        """Free the memory of these parts, or of all ``movable`` parts if none are given. The cache is lost.

        Weights are kept in host memory (vLLM's level 1). Use ``keep=False`` to drop them instead (level 2) if
        new weights will be received anyway.
        """
        movable = self.capabilities(self.settings, self.spec.device).movable
        self.asleep |= set(parts or movable) & set(movable)
        if "weights" in self.asleep:
            self.engine.llm.sleep(1 if keep else 2)  # this also frees the cache
            self._wake(set(movable) - self.asleep)
        elif self.asleep:
            self.engine.llm.release_kv_cache_memory()

    def wake(self, *parts: str) -> None:
        """Allocate the memory of these parts again, or of all parts if none are given.

        Wake the weights first to receive new ones before the cache takes up memory. Weights that were dropped
        must be received before sampling.
        """
        names = self.asleep & set(parts or TAGS)
        self._wake(names)
        self.asleep -= names

    def _wake(self, parts: Iterable[str]) -> None:
        if tags := [TAGS[part] for part in sorted(parts)]:
            self.engine.llm.wake_up(tags)


def same_rotary(config: Any, spec: ModelSpec, settings: GeneratorSettings) -> GeneratorSettings:
    """Return settings that make vLLM use the trainer's rotary frequencies.

    They only differ from ``settings`` if the frequencies depend on the longest row of a run, because vLLM
    chooses them by ``max_model_len``. Raises PlanError if vLLM can't use the trainer's frequencies.
    """
    for boundary in pretrained.length_boundaries(config).values():
        if _longest(config, spec) <= boundary.tokens:
            settings = replace(
                settings, max_model_len=min(settings.max_model_len or boundary.tokens, boundary.tokens)
            )
        elif boundary.grows:
            raise PlanError.of(
                "rotary",
                f"vLLM and transformers rotate rows of more than {boundary.tokens} tokens differently: rope "
                "type 'dynamic' of transformers depends on the longest row",
                found=f"rows of up to {_longest(config, spec)} tokens in {spec.folder}",
                expected=f"at most {boundary.tokens} tokens",
                remedy="use --ROLE.generator local, or shorter rows: --data.max_prompt, max_tokens",
            )
        else:  # by default, vLLM accepts no rows beyond the boundary
            settings = replace(settings, max_model_len=settings.max_model_len or _longest(config, spec))
    return settings


def check_rotary(config: Any, spec: ModelSpec, longest: int) -> None:
    """Raise PlanError if vLLM and the trainer have chosen different rotary frequencies. vLLM's rows have at
    most ``longest`` tokens; the trainer's may be longer."""
    for boundary in pretrained.length_boundaries(config).values():
        if longest <= boundary.tokens < _longest(config, spec):
            raise PlanError.of(
                "rotary",
                "vLLM uses the rotary frequencies of short rows, but the trainer those of long rows",
                found=f"rows of at most {longest} tokens in vLLM, of {_longest(config, spec)} in the run",
                expected=f"both at most {boundary.tokens} tokens, or both more",
                remedy="a larger --ROLE.max_model_len or --ROLE.kv_cache_memory_bytes, or --longest-row "
                f"{longest}",
            )


def _longest(config: Any, spec: ModelSpec) -> int:
    return spec.longest or room_of(config) or 0


def _configs(folder: Path) -> tuple[Any, Any]:
    """Return the generation config and the config of a model folder."""
    config = pretrained.read_config(folder)
    own = (folder / "generation_config.json").is_file()
    generation = (
        pretrained.read_generation_config(folder) if own else GenerationConfig.from_model_config(config)
    )
    return generation, config
