"""The engine of a run in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlflow.author import methods
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.figures import Figure, Of
from rlflow.author.loss import Loss
from rlflow.author.node_options import UpdateOptions
from rlflow.author.seeds import row_seeds
from rlflow.author.stage import Stage
from rlflow.compiler.residency_schedule import computing, following, learning, sampling, syncing
from rlflow.execution import episodes
from rlflow.execution.apply import apply_stage
from rlflow.execution.engine import HERE, CallOptions, Chunks, Engine, whole
from rlflow.execution.lineage import whole_completions
from rlflow.execution.role_model import Model
from rlflow.execution.row_ledger import UpdateRows
from rlflow.execution.tally import PartialMetric, PartialMetrics, known
from rlflow.training.chunks import chunked
from rlflow.training.following import follow
from rlflow.training.loss_rows import WITH_GROUP, broken_columns, group_of, mask_counts, with_groups
from rlflow.training.protocols import (
    ForwardsAhead,
    GivesChunks,
    ResetsOptimizer,
    Sampling,
    ScoresTokens,
    ShowsMasters,
    as_long,
)


@dataclass
class LocalEngine(Engine):
    """Runs all calls of a flow in this process."""

    models: Mapping[str, Model]  # by role

    def sample(
        self, role: str, prompts: Batch, sampling: Sampling, seed: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Sample ``sampling.samples`` rows per prompt with the newest weights. Equal seeds give equal rows."""
        model = self._synchronised(role)
        assert model.generator is not None
        seeds = row_seeds(seed, prompts.axis.repeat(sampling.samples).keys)
        if role in self.environments:
            rows = self._episodes(role, sampling).sampled(prompts, seeds, seed)
        else:
            rows = as_long(
                model.generator.generate(prompts.select("prompt_tokens"), sampling, seeds), sampling
            )
        rows = self._with_beginnings(role, prompts, rows, sampling.skip_special_tokens)
        return whole(rows, len(prompts) * sampling.samples, self.sampled_columns(role))

    def _episodes(self, role: str, sampling: Sampling) -> episodes.Episodes:
        generator, ask = self.models[role].generator, self.asking
        assert generator is not None
        speak, decode = (
            partial(ask.speak, (role,)),
            partial(ask.decode, (role,), bare=sampling.skip_special_tokens),
        )
        speech = episodes.Speech(
            speak, lambda text: speak([text], [[]])[0], decode, partial(ask.calls, (role,))
        )
        return episodes.Episodes(generator.generate, self.environments[role], sampling, speech)

    def sample_chunks(
        self,
        role: str,
        prompts: Batch,
        sampling: Sampling,
        seed: int,
        into: Chunks,
        call_options: CallOptions = HERE,
    ) -> Iterator[Batch]:
        """Sample from the given seed and yield the rows in chunks, as ``chunks`` does.

        Equal seeds give equal rows. The axis of each chunk is a selection from the axis of all rows. After
        the chunks, one last batch with all rows is yielded.
        """
        # with an environment all rows take each turn together, so all rows end at the same time
        if role in self.environments:
            rows = self.sample(role, prompts, sampling, seed, call_options)
            lengths = rows.data["tokens"].row_lengths
            for index in chunked([lengths.argsort(stable=True)], len(rows), into.count):
                yield rows.rows(index).select(*into.names)
            yield rows
            return
        generator = self._synchronised(role).generator
        assert isinstance(generator, GivesChunks)
        seeds = row_seeds(seed, prompts.axis.repeat(sampling.samples).keys)
        pieces: list[Batch] = []
        for chunk in generator.generate_chunks(prompts.select("prompt_tokens"), sampling, seeds, into.count):
            pieces.append(
                self._with_beginnings(role, prompts, as_long(chunk, sampling), sampling.skip_special_tokens)
            )
            yield pieces[-1].select(*into.names)
        if len(pieces) != into.count:
            raise ValueError(f"found {len(pieces)} chunks of sampled rows, expected {into.count}")
        rows = self.in_order(pieces)
        yield whole(rows, len(prompts) * sampling.samples, (*methods.GENERATE_GIVES, "group"))

    def _with_beginnings(self, role: str, prompts: Batch, rows: Batch, bare: bool) -> Batch:
        """Return the rows, with any part of the response that was in the prompt put before ``completion``."""
        if "prefix_length" not in prompts:
            return rows
        return whole_completions(partial(self.asking.decode, (role,), bare=bare), prompts, rows)

    def forward(
        self, role: str, want: tuple[str, ...], batch: Batch, call_options: CallOptions = HERE
    ) -> Batch:
        """Run a forward pass of the role's trainer over the rows, and return the columns ``want``.

        ``want``: the quantities to compute, such as ``logprobs``.
        """
        trainer = self.models[role].trainer
        assert trainer is not None
        self.offloads.settle(computing(role))
        forward = (
            trainer.forward_ahead
            if call_options.ahead and isinstance(trainer, ForwardsAhead)
            else trainer.forward
        )
        return Batch(batch.axis, whole(forward(batch, want), len(batch), want).data)

    def score(self, role: str, batch: Batch, call_options: CallOptions = HERE) -> Batch:
        """Return the column ``logprobs``, computed by the role's generator for the tokens of the rows.

        The generator first gets the trainer's newest weights.
        """
        generator = self._synchronised(role).generator
        assert isinstance(generator, ScoresTokens)
        rows = generator.logprobs(batch)
        return Batch(batch.axis, whole(rows, len(batch), ("logprobs",)).data)

    def reward(
        self, role: str, batch: Batch, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Score the rows. Return the column ``scores``, and metrics such as the number of missing scores.

        Rows whose episode failed aren't passed to the reward, and get no score.
        """
        causes = batch["failed"] if "failed" in batch else ()  # noqa: SIM401 - a batch has no get
        sound = [row for row, cause in enumerate(causes) if not cause] if any(causes) else None
        judged = batch if sound is None else batch.rows(sound)
        scores, metrics = self.scorers[role](judged) if len(judged) or sound is None else (torch.zeros(0), {})
        if tuple(scores.shape) != (len(judged),):
            raise ValueError(
                f"found scores of shape {list(scores.shape)}, expected [{len(judged)}], one per row"
            )
        scores = scores if scores.dtype is torch.float64 else scores.float()
        if sound is not None:
            scores = torch.full((len(batch),), torch.nan, dtype=scores.dtype).index_copy(
                0, torch.tensor(sound, dtype=torch.int64), scores
            )
            counts = Counter(cause for cause in causes if cause)
            metrics = {
                **metrics,
                **{Figure(Of.MISSING, cause): PartialMetric.sum(count) for cause, count in counts.items()},
            }
        data = Data(Kind(Level.ROW, str(scores.dtype).removeprefix("torch.")), scores)
        metrics = {
            "mean": PartialMetric.of(scores),
            **metrics,
            "missing": PartialMetric.sum(float(scores.isnan().sum())),
        }
        return Batch(batch.axis, {"scores": data}), metrics

    def update(
        self,
        role: str,
        batch: Batch,
        loss: Loss,
        options: UpdateOptions,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
        fresh: bool = False,
    ) -> tuple[PartialMetrics, UpdateRows]:
        """Train the role on the rows.

        ``settings``: the settings of the loss. ``call``: the number of the call in the iteration. ``fresh``:
        whether to reset the optimizer first. Returns metrics, and for each row whether the update learned
        from it.
        """
        model = self.models[role]
        assert model.trainer is not None
        self.offloads.settle(learning(role))
        if fresh:
            assert isinstance(model.trainer, ResetsOptimizer)
            model.trainer.reset_optimizer()
        broken = broken_columns(batch, loss)
        broken = with_groups(broken, group_of(batch), WITH_GROUP) if loss.rows == "group" else broken
        metrics = model.trainer.update(
            batch,
            loss,
            epochs=options.epochs,
            minibatch=options.minibatch,
            mean=options.mean,
            seed=self.seed_of(call),
            **settings,
        )
        model.version += 1
        names, stepped = loss.signature.column_names, metrics.get("steps", 1) > 0
        return known(metrics), UpdateRows(broken, names, stepped=stepped, tokens=mask_counts(batch))

    def move(self, role: str, other: str, mix: float, call_options: CallOptions = HERE) -> None:
        """Move the weights of a role's trainer towards those of another role's trainer."""
        trainer, source = self.models[role].trainer, self.models[other].trainer
        assert isinstance(trainer, ShowsMasters)
        assert isinstance(source, ShowsMasters)
        self.offloads.settle(following(role, other))
        follow(trainer, source.masters(), mix)

    def stage(
        self,
        stage: Stage,
        batch: Batch,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
    ) -> tuple[Batch, PartialMetrics]:
        """Run a stage on the rows. Return its output columns and its partial metrics."""
        self.may_change(stage)
        trainer = self.models[stage.on].trainer if stage.on else None
        if stage.on:
            self.offloads.settle(learning(stage.on))
        return apply_stage(stage, batch, settings, self.seed_of(call), trainer)

    def _synchronised(self, role: str) -> Model:
        """Return the role's model, with its generator loaded into memory and using the newest weights."""
        model = self.models[role]
        if model.stale:
            self.offloads.settle(syncing(role))
            model.synchronise()
        self.offloads.settle(sampling(role))
        return model
