"""The local generator, which samples with its own copy of the weights or with the tensors of a trainer in the
same process."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, flatten, group_column
from rlflow.author.columns import Kind, Level
from rlflow.author.seeds import uniforms
from rlflow.backends.local.decode import Drawn, block_of, can_branch, check_cache, decode, sent
from rlflow.backends.local.endings import Endings, ends_of_call, eos_of
from rlflow.backends.local.head import read_few_rows
from rlflow.backends.local.logprobs import logprobs_and_entropy, tokens_at_once
from rlflow.backends.local.network import Network, load_network
from rlflow.backends.local.offload import OffloadedParts
from rlflow.backends.local.room import check_room, longest
from rlflow.backends.local.sequences import longest_row, sequences
from rlflow.backends.local.settings import GeneratorSettings
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.backends.local.transformers_internals import CACHE_ARGUMENTS
from rlflow.data.spoken import completions
from rlflow.errors import PlanError, listed
from rlflow.training.chunks import chunked
from rlflow.training.minibatches import microbatches
from rlflow.training.protocols import Capabilities, ModelSpec, Sampling
from rlflow.training.weight_sync.layout import Spread
from rlflow.training.weight_sync.proof import Destinations
from rlflow.training.weight_sync.shards import pieces_of

# from this number of samples per prompt on, sharing keys and values saves more time than joining costs
BRANCHED = 4


class Generator:
    """Samples responses with the weights last passed to ``receive``."""

    Settings = GeneratorSettings

    def __init__(self, spec: ModelSpec, settings: GeneratorSettings | None = None) -> None:
        self.spec, self.settings = spec, settings or GeneratorSettings()
        self.network = load_network(
            ModelSpec(
                spec.folder, "logprobs", False, spec.device, spec.dtype, spec.seed, longest=spec.longest
            )
        )
        if self.network.cache_argument is None:
            raise PlanError.of(
                "no-cache",
                f"{type(self.network.module).__name__} has no key-value cache for the local generator",
                found=f"a forward without {listed(CACHE_ARGUMENTS)}",
                expected="an attention model such as Llama, Qwen or Gemma",
                remedy="--ROLE.generator vllm",
            )
        check_cache(self.network)
        read_few_rows(self.network)
        self.branches = can_branch(self.network)
        self.tokenizer = load_tokenizer(spec.folder)
        self.eos = eos_ids(spec, self.network, self.tokenizer)
        self.version = 0
        self.offloaded = OffloadedParts()

    @classmethod
    def capabilities(cls, settings: GeneratorSettings, device: str) -> Capabilities:
        """Return the generator's capabilities. A subclass can't share a trainer's tensors, and its ranks
        can't be threads."""
        return Capabilities(
            threads=cls is Generator,
            movable=("weights",),
            passing=("cache",),
            batch_tokens=settings.batch_tokens,
            shares=cls is Generator,
        )

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        """Sample ``sampling.samples`` responses to each prompt. ``seeds`` has one number per response.

        Returns tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version and group on
        the axis ``prompts.axis.repeat(samples)``, without the columns of the prompts.

        A row's tokens are determined by its prompt, its seed and the weights. Other rows affect them only
        through rounding in matrix products (about 1e-7 in float32), which changes a token only if a
        cumulative probability is that close to its random number.
        """
        axis = _rows(prompts, sampling, seeds)
        out = self._nothing_drawn(len(axis), sampling)
        for rows, drawing in self._drawings(prompts, sampling, seeds):
            drawn, _ = deque(drawing, maxlen=1).pop()
            _take(out, rows, drawn, torch.arange(len(rows)))
        return self._batch(axis, out, sampling)

    def generate_chunks(
        self, prompts: Batch, sampling: Sampling, seeds: Sequence[int], chunks: int
    ) -> Iterator[Batch]:
        """Yield the rows of ``generate`` in ``chunks`` batches, each as soon as all its rows have ended.

        Shorter rows come first. Rows of equal length are ordered by how they ended (those that ended by
        themselves come first) and then by number. If the cache can't hold all rows, they are sampled in
        several batches, one after another.
        """
        axis = _rows(prompts, sampling, seeds)
        out = self._nothing_drawn(len(axis), sampling)

        def ended() -> Iterator[Tensor]:
            for rows, drawing in self._drawings(prompts, sampling, seeds):
                for drawn, done in drawing:
                    _take(out, rows, drawn, done)
                    yield _in_order(out, rows[done])

        for rows in chunked(ended(), len(axis), chunks):
            yield self._batch(
                axis.take(rows), Drawn(*(getattr(out, name)[rows] for name in vars(out))), sampling
            )

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Batch:
        """Return the column ``logprobs`` for ``tokens`` following ``prompt_tokens``, at temperature 1 under
        the generator's weights. All rows are computed in one pass."""
        self.network.check_row(longest_row(batch))
        layout = sequences(batch, self.network.device)
        positions = torch.arange(layout.ids.shape[1], device=self.network.device)[None]
        hidden = self.network.hidden(layout.ids, positions, use_cache=False).flatten(0, 1)[layout.before]
        tokens = tokens_at_once(0, self.network.vocabulary)
        flat, _ = logprobs_and_entropy(
            self.network.logits, hidden, layout.targets, None, tokens=tokens, entropy=False
        )
        return Batch(
            batch.axis,
            {
                "logprobs": Data(
                    Kind(Level.TOKEN, str(flat.dtype).removeprefix("torch.")), flat.cpu(), layout.lengths
                )
            },
        )

    def _batch(self, axis: Axis, drawn: Drawn, sampling: Sampling) -> Batch:
        columns = _columns(drawn, sampling, self.version) | self._text(drawn, sampling)
        return Batch(axis, columns | {"group": group_column(axis)})

    def _nothing_drawn(self, rows: int, sampling: Sampling) -> Drawn:
        """Create empty responses for all rows on the CPU. Sampled rows are copied into them, because training
        can't use tensors created in inference mode."""
        return Drawn.nothing(
            rows, sampling.max_tokens, torch.promote_types(self.network.module.dtype, torch.float32)
        )

    def share(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Sample directly with these tensors from now on. They are trained by a trainer in the same
        process."""
        self.network.share(weights)

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights by Hugging Face name into this generator's tensors, keeping their dtypes.

        version: how many updates the new weights contain. Raises ValueError if a name is unknown or missing,
        or if a shape differs.
        """
        with self.writing(version):
            self.load(weights)

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copy weights by name into this generator's tensors, leaving the version as it is. Raises ValueError
        if a name is unknown or missing, or if a shape differs."""
        self.network.copy(weights)

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Let a ``with`` block write into the memory of ``destinations``. When the block ends, the weights
        have this version."""
        yield
        self.version = version

    def destinations(self, tensors: Mapping[str, Spread]) -> Destinations:
        """Return the memory to write each of these tensors to: the complete parameter of the same name."""
        own = pieces_of((names[0], tensor) for names, tensor in self.network.own() if names[0] in tensors)
        return Destinations(own, {}, {}, self.network.device)

    def sleep(self, *parts: str) -> None:
        """Free the memory of the weights. See ``Trainer.sleep`` for where they are kept."""
        self.offloaded.put("weights", self.network.held())
        self.network.asleep = True

    def wake(self, *parts: str) -> None:
        """Restore the weights, bit for bit."""
        self.offloaded.back("weights")
        self.network.asleep = False

    def _batches(self, prompts: Batch, rows: int, sampling: Sampling) -> Iterator[Tensor]:
        """Yield batches of row indices. A batch has rows with prompts of similar length, as many as fit into
        the cache."""
        own = prompts.data["prompt_tokens"].lengths
        config, folder = self.network.module.config, self.spec.folder
        check_room(
            own.tolist(), sampling.max_tokens, longest(config), f"the positions of the model in {folder}"
        )
        self.network.check_row(int(own.max()) + sampling.max_tokens if len(own) else 0)
        lengths = own.repeat_interleave(sampling.samples)
        units = list(torch.arange(rows).split(1)) if rows else []
        for unit in microbatches(units, lengths + sampling.max_tokens, tokens=self.settings.batch_tokens):
            yield torch.cat(unit)

    def _drawings(
        self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[Tensor, Iterator[tuple[Drawn, Tensor]]]]:
        """For each batch, yield its row indices and an iterator over its rows as they end."""
        prompts = prompts.select("prompt_tokens")
        for rows in self._batches(prompts, len(seeds), sampling):
            yield rows, self._sample(prompts, rows, sampling, seeds)

    def _sample(
        self, prompts: Batch, rows: Tensor, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[Drawn, Tensor]]:
        which, of = torch.unique_consecutive(rows // sampling.samples, return_inverse=True)
        pieces = prompts.data["prompt_tokens"].take(which, prompts.axis).split()
        device = self.network.device
        uniform = uniforms([seeds[row] for row in rows.tolist()], sampling.max_tokens).to(device)
        own = sampling.of_rows(prompts.axis.repeat(sampling.samples).keys[rows]) if sampling.lengths else ()
        lengths = torch.tensor([each.max_tokens for each in own]) if own else None
        eos = torch.tensor(ends_of_call(self.eos, sampling, self.network.vocabulary), dtype=torch.int64)
        ends = Endings(
            eos, sampling.stop, self.tokenizer, sampling.min_tokens, sampling.skip_special_tokens, lengths
        )
        branch = self.branches and len(rows) >= BRANCHED * len(which)
        return decode(self.network, pieces, of, uniform, sampling, ends, block_of(device), branch)

    def _text(self, drawn: Drawn, sampling: Sampling) -> dict[str, Data]:
        rows = [
            row[:length] for row, length in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True)
        ]
        responses = completions(self.tokenizer, rows, self.eos, sampling.skip_special_tokens)
        finish = (
            "stop" if stopped and not sampling.lengths else "length" for stopped in drawn.stopped.tolist()
        )
        return {
            "completion": Data(Kind(Level.TEXT), tuple(responses)),
            "finish": Data(Kind(Level.TEXT), tuple(finish)),
        }


def eos_ids(spec: ModelSpec, network: Network, tokenizer: Any) -> list[int]:
    """Return all tokens that end this model's responses, as found by ``eos_of``."""
    module = network.module
    configs = module.generation_config, module.config, module.config.get_text_config()
    return eos_of(spec, configs, module.get_output_embeddings().weight.shape[0], tokenizer)


def _rows(prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Axis:
    axis = prompts.axis.repeat(sampling.samples)
    if len(seeds) != len(axis):
        raise ValueError(f"generate: found {len(seeds)} seeds, expected one per row: {len(axis)}")
    return axis


def _take(out: Drawn, rows: Tensor, drawn: Drawn, done: Tensor) -> None:
    """Copy the rows ``done`` of a batch into ``out``, which holds all rows. ``rows`` are the batch's row
    indices in ``out``."""
    on_device = sent(done, drawn.tokens.device)
    out.tokens[rows[done]], out.logprobs[rows[done]] = (
        drawn.tokens[on_device].cpu(),
        drawn.logprobs[on_device].cpu(),
    )
    out.lengths[rows[done]], out.stopped[rows[done]] = drawn.lengths[done], drawn.stopped[done]


def _in_order(out: Drawn, rows: Tensor) -> Tensor:
    """Sort rows that have just ended by length. Of equally long rows, those that ended by themselves come
    first."""
    ends = zip(out.lengths[rows].tolist(), (~out.stopped[rows]).tolist(), rows.tolist(), strict=True)
    return torch.tensor([row for _, _, row in sorted(ends)], dtype=torch.int64)


def _columns(drawn: Drawn, sampling: Sampling, version: int) -> dict[str, Data]:
    lengths = drawn.lengths
    tokens, logprobs = flatten(drawn.tokens, lengths), flatten(drawn.logprobs, lengths)
    # the temperature divides the logits, so a greedy row has 1
    temperature = torch.full((len(lengths),), sampling.temperature or 1.0, dtype=logprobs.dtype)
    token_level = {
        "tokens": tokens,
        "mask": torch.ones(len(tokens), dtype=torch.bool),
        "sampled_logprobs": logprobs,
        "policy_version": torch.full((len(tokens),), version, dtype=torch.int64),
    }
    columns = {
        name: Data(Kind(Level.TOKEN, str(x.dtype).removeprefix("torch.")), x, lengths)
        for name, x in token_level.items()
    }
    return columns | {
        "temperature": Data(Kind(Level.ROW, str(temperature.dtype).removeprefix("torch.")), temperature)
    }
