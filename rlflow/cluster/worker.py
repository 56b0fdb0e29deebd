"""Worker: one rank of a pool, with its trainers, generators and rewards, and the columns it stores."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rlflow.author.batch import Batch
from rlflow.author.columns import Level
from rlflow.author.figures import Cause
from rlflow.author.flow import Flow
from rlflow.author.joint import JointLoss
from rlflow.author.loss import Loss
from rlflow.author.stage import Stage
from rlflow.cluster.group import LOOPBACK, group_of_threads, join
from rlflow.cluster.health.heartbeat import MARKS
from rlflow.cluster.rpc.message import Answer, Call, Index
from rlflow.cluster.rpc.replies import content
from rlflow.cluster.rpc.row_messages import RowMessage, inline, size_of
from rlflow.cluster.rpc.wire_tensors import pack_tensors, unpack_tensors
from rlflow.cluster.setup import Setup
from rlflow.cluster.sharding.shard_store import ShardStore
from rlflow.cluster.weights.endpoints import End, Following, What, end_of
from rlflow.cluster.weights.same_ranks import SameRankTransfer, movable
from rlflow.compiler.graph.model import used_nodes
from rlflow.compiler.placement import reward_pools
from rlflow.compiler.residency_schedule import Parts, computing, copying, following, learning, syncing
from rlflow.config.options import Options
from rlflow.config.roles.asking import asking
from rlflow.config.roles.backends import device_of
from rlflow.config.roles.bound import BoundRole, Sides, bind_roles
from rlflow.config.roles.environments import Environments
from rlflow.config.roles.loaded_models import make_models
from rlflow.config.roles.rewards import ModelScore, RewardNames, Rewards
from rlflow.errors import Reason
from rlflow.execution.apply import apply_piece, apply_stage, merge_pieces
from rlflow.execution.engine import CallOptions
from rlflow.execution.lineage import filling
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.offload_manager import OffloadManager
from rlflow.execution.summary import summarise
from rlflow.execution.tally import PartialMetrics
from rlflow.execution.wire.row_bytes import Payload, RowRanks, packed
from rlflow.monitoring.lines import WaitingLines
from rlflow.monitoring.secrets import guard, remember
from rlflow.processes.interfaces import Interface
from rlflow.training.following import complete, follow
from rlflow.training.learning import RankShare
from rlflow.training.loss_rows import broken_columns, group_of, mask_counts, own_rows, token_counts
from rlflow.training.objective import MinibatchTotals
from rlflow.training.protocols import ResetsOptimizer, ShowsMasters, Trainer
from rlflow.training.threads import others_alone


class Worker:
    """Runs the driver's calls on one rank with a ``LocalEngine``, the engine of runs in one process."""

    def __init__(self, setup: Setup, flow: Flow | None = None, group: Any = None) -> None:
        """Load this rank's models.

        ``flow`` and ``group`` are only given if the ranks are threads of the driver's process: the driver's
        flow, and the ranks' torch process group.
        """
        self.setup, self.group = setup, group
        self.program = setup.program(flow)
        self.store = ShardStore()
        self.same_rank_transfers: dict[str, SameRankTransfer] = {}
        self.ends: dict[What, End] = {}
        names = RewardNames.of(setup.config, self.program.flow)
        self.rewards = Rewards(names, setup.data, setup.config.options, setup.config.tokenizer_folder)
        self.printed = WaitingLines()
        self.rewards.on_output(self.printed.on_output)
        self.engine = self._engine()
        others_alone()

    def _engine(self) -> LocalEngine:
        """Return the engine with this pool's models.

        A role has only a trainer, or only a generator, if the other one is on a different pool.
        """
        setup, graph = self.setup, self.program.graph
        used = {node.role for node in used_nodes(graph)}
        roles = bind_roles(graph, setup.config)
        device = device_of(setup.config.options.device)
        offloads = OffloadManager(setup.offload_plan)
        models = make_models(
            roles.values(),
            setup.config.options,
            device,
            setup.updates,
            self._wanted,
            offloads.loaded,
            self.group,
        )
        judges = [use.name for use in graph.roles if use.name in used and use.name not in roles]
        scorers: dict[str, Any] = {name: self.rewards.scorer(name, self.program.weighed) for name in judges}
        options = setup.config.options
        self.environments = Environments(setup.options.environments, graph, options)
        self.environments.on_output(self.printed.on_output)
        engine = LocalEngine(
            models,
            scorers,
            options.seed,
            _no_data,
            reward_timeout=options.reward_timeout,
            offloads=offloads,
            asking=asking(graph, roles, setup.config, setup.options.environments),
            environments=self.environments.pools,
        )
        scorers |= {name: ModelScore(engine, name) for name, role in roles.items() if role.use.rewards}
        pools_of_judges = reward_pools(graph, setup.placement)
        self.rewards.load_models(
            device,
            setup.config.options,
            [role for role, pools in pools_of_judges.items() if setup.pool in pools],
        )
        return engine

    def _wanted(self, role: BoundRole) -> Sides:
        """Return whether the trainer and the generator of a role are placed on this pool."""
        placement, pool = self.setup.placement, self.setup.pool
        return Sides(placement.trainers.get(role.name) == pool, placement.generators.get(role.name) == pool)

    # -- columns
    # --------------------------------------------------------------------------------------------------------

    def slice(
        self, key: int, names: tuple[str, ...], rows: Index | None, shared: bool, iteration: int
    ) -> RowMessage:
        """Return rows of some of a shard's columns, as a message for another worker.

        ``rows``: row indices, or None for all rows. ``shared``: whether the receiver can read this process's
        shared memory. ``iteration``: the iteration that uses the rows.
        """
        return self.store.slice(key, names, rows, shared, iteration)

    def forget(self, keys: tuple[int, ...]) -> None:
        """Drop the shards with these keys."""
        self.store.forget(keys)

    def clear(self, iteration: int, keys: Sequence[int] = ()) -> None:
        """Drop all shards stored for this iteration or earlier ones, and the shards with these keys."""
        self.store.forget(keys)
        self.store.clear(iteration)

    def held(self) -> int:
        """Return the number of stored shards."""
        return len(self.store)

    # -- calls
    # --------------------------------------------------------------------------------------------------------

    def run(self, frame: bytes | memoryview, *transfers: RowMessage) -> bytes | Answer:
        """Run the operation that a call asks for, and return its packed ``Answer``.

        ``frame``: a packed ``Call``. ``transfers``: rows from other workers that aren't in the frame.
        """
        call = Call.unpacked(frame)
        self.store.forget(call.forget)
        with MARKS.during(call):
            start = time.time()
            rows = call.rows(transfers)
            batch = self.store.batch(call.inputs, rows, call.iteration)
            answer = OPERATIONS[call.op](self, call, batch)
            received = sum(map(size_of, rows))
            return answer._replace(
                ran=(start, time.time()), printed=self.printed.take(), received=received
            ).packed()

    def run_chunks(self, frame: bytes | memoryview, *transfers: RowMessage) -> Iterator[bytes | Answer]:
        """Sample rows in chunks. Yield a packed answer for each chunk, and then one for all rows.

        Each chunk is stored under a key of its own. The ``value`` of its answer contains the indices of its
        rows.
        """
        call = Call.unpacked(frame)
        self.store.forget(call.forget)
        role, sampling, seed, into, keys = (
            call.arguments[name] for name in ("role", "sampling", "seed", "into", "keys")
        )
        with MARKS.during(call):
            start = time.time()
            coming = call.rows(transfers)
            batch = self.store.batch(call.inputs, coming)
            rows = self.engine.sample_chunks(role, batch, sampling, seed, into)
            for key, chunk in zip(keys, itertools.islice(rows, into.count), strict=True):
                assert chunk.axis.index is not None
                answer = self._keep(call._replace(key=key), chunk)._replace(value=chunk.axis.index.numpy())
                yield answer._replace(ran=(start, start := time.time())).packed()
            yield (
                self._keep(call, next(rows))
                ._replace(ran=(start, time.time()), received=sum(map(size_of, coming)))
                .packed()
            )

    def _keep(self, call: Call, batch: Batch, tallies: PartialMetrics | None = None) -> Answer:
        """Store a batch under the call's key.

        The answer describes the stored columns and contains the scalars.
        """
        scalars = {name: data for name, data in batch.data.items() if data.kind.level is Level.SCALAR}
        stored = Batch(batch.axis, {name: data for name, data in batch.data.items() if name not in scalars})
        self.store.put(call.key, stored, call.iteration)
        lengths = {
            data.kind.level.value: data.lengths.numpy()
            for data in stored.data.values()
            if data.lengths is not None
        }
        columns = {name: (data.kind, data.nbytes) for name, data in stored.data.items()}
        return Answer(call.key, len(stored), columns, lengths, scalars, tallies or {})

    def generate(self, call: Call, batch: Batch) -> Answer:
        """Sample responses to the prompts in ``batch``, and store them."""
        role, sampling, seed = (call.arguments[name] for name in ("role", "sampling", "seed"))
        rows = self.engine.sample(role, batch, sampling, seed)
        return self._keep(call, Batch(batch.axis.repeat(sampling.samples), rows.data))

    def forward(self, call: Call, batch: Batch) -> Answer:
        """Run the forward pass of a role's trainer on ``batch``, and store the requested columns."""
        role, want, ahead = (call.arguments[name] for name in ("role", "want", "ahead"))
        return self._keep(call, self.engine.forward(role, want, batch, CallOptions(ahead=ahead)))

    def score(self, call: Call, batch: Batch) -> Answer:
        """Compute log-probs of ``batch`` under a role's generator, and store them."""
        return self._keep(call, self.engine.score(call.arguments["role"], batch))

    def reward(self, call: Call, batch: Batch) -> Answer:
        """Score the rows of ``batch`` with a role's rewards, and store the scores."""
        scores, tallies = self.engine.reward(call.arguments["role"], batch)
        return self._keep(call, scores, tallies)

    def encode(self, call: Call, batch: Batch) -> Answer:
        """Encode the follow-up prompts in ``batch`` for the roles that read them, and store the token ids."""
        return self._keep(call, self.engine.encoded(batch, call.arguments["roles"]))

    def responses(self, call: Call, batch: Batch) -> Answer:
        """Encode the texts in ``batch`` as responses for the roles that learn from them, and store these."""
        return self._keep(call, self.engine.responses(batch, call.arguments["roles"]))

    def filled(self, call: Call, batch: Batch) -> Answer:
        """Make columns with the same value in all tokens of the rows, and store them."""
        return self._keep(call, Batch(batch.axis, filling(batch, call.arguments["columns"])))

    def cut(self, call: Call, batch: Batch) -> Answer:
        """Store the beginnings of responses from which new responses continue.

        The ``value`` of the answer is a pair: how many beginnings each row has, and how many response tokens
        each beginning has.
        """
        rows, place = self.engine.cut(batch)
        counts = torch.bincount(rows.axis.back_to(batch.axis), minlength=len(batch))
        return self._keep(call, rows)._replace(value=(counts.numpy(), place.numpy()))

    def stage(self, call: Call, batch: Batch) -> Answer:
        """Run a stage of the flow on ``batch``, and store the stage's columns."""
        stage = self.program.stage(call.arguments["function"])
        result, tallies = apply_stage(
            stage, batch, call.arguments["settings"], call.arguments["seed"], self._on(stage)
        )
        return self._keep(call, result, tallies)

    def _on(self, stage: Stage) -> Trainer | None:
        """Load the trainer of a stage's role into memory, and return it. None if the stage has no role."""
        return self._trainer(stage.on, learning(stage.on)) if stage.on else None

    def split(self, call: Call, batch: Batch) -> Answer:
        """Split ``batch`` with an author's dispatch mode, and store the pieces.

        The ``value`` of the answer has the description and the row axis of each piece.
        """
        split = self.program.stage(call.arguments["function"]).dispatch.split
        assert split is not None
        pieces = split(batch, self.setup.ranks)
        keys = call.arguments["keys"]
        if len(pieces) > len(keys):
            raise ValueError(f"found {len(pieces)} pieces, expected at most {len(keys)}, one per rank")
        stored = [
            (self._keep(call._replace(key=key), piece), (piece.axis.keys.numpy(), piece.axis.grouped))
            for key, piece in zip(keys, pieces, strict=False)
        ]
        return Answer(call.key, value=stored)

    def piece(self, call: Call, batch: Batch) -> Answer:
        """Run a stage on one piece from an author's dispatch mode, ``batch``, and store its columns."""
        stage = self.program.stage(call.arguments["function"])
        result, tallies = apply_piece(
            stage, batch, call.arguments["settings"], call.arguments["seed"], self._on(stage)
        )
        return self._keep(call, result, tallies)

    def merge(self, call: Call, batch: Batch) -> Answer:
        """Merge the outputs for all pieces with an author's dispatch mode, and store the result."""
        outputs = [self.store.get(key) for key in call.arguments["outputs"]]
        return self._keep(call, merge_pieces(self.program.stage(call.arguments["function"]), outputs, batch))

    def facts(self, call: Call, batch: Batch) -> Answer:
        """Return what the driver must know about each row to plan the steps of an update.

        The ``value`` of the answer is int64 [rows, 4 or more]. Its columns are: why the row is excluded from
        the update (0 if it isn't), the number of unmasked tokens, the number of all tokens, the group and, if
        there are several losses, whether each one uses the row. The rows are stored for the update.
        """
        loss = self.program.loss(call.arguments["function"])
        own = own_rows(batch, loss).unbind(1) if isinstance(loss, JointLoss) else ()
        groups = batch.data["group"].value if "group" in batch else batch.axis.group_numbers
        facts = torch.stack(
            [broken_columns(batch, loss), mask_counts(batch), token_counts(batch), groups, *own], 1
        )
        return self._keep(call, batch)._replace(value=facts.numpy())

    def update(self, call: Call, batch: Batch) -> Answer:
        """Train a role's model on this rank's rows of each optimizer step.

        ``call.arguments["steps"]`` has a pair for each step: the indices in ``batch`` of this rank's rows,
        and the totals of the whole minibatch. ``call.arguments["fresh"]``: whether to reset the optimizer
        first.
        """
        loss, role = self.program.loss(call.arguments["function"]), call.arguments["role"]
        shares = [
            self._share(batch, loss, torch.tensor(rows), MinibatchTotals(*totals))
            for rows, totals in call.arguments["steps"]
        ]
        trainer = self._trainer(role, learning(role))
        if call.arguments["fresh"]:
            assert isinstance(trainer, ResetsOptimizer)
            trainer.reset_optimizer()
        learned = trainer.update_shares(
            batch, loss, shares, call.arguments["mean"], call.arguments["settings"]
        )
        self.engine.models[role].version += 1
        return Answer(value=learned)

    def _share(self, batch: Batch, loss: Loss, rows: torch.Tensor, totals: MinibatchTotals) -> RankShare:
        """Return this rank's rows of one optimizer step, in the order in which they are used.

        They are split into complete groups if the loss needs groups, otherwise into single rows.
        """
        if loss.rows != "group" or not len(rows):
            return RankShare(list(torch.split(rows, 1)) if len(rows) else [], totals)
        groups = group_of(batch)[rows]
        return RankShare(
            list(torch.split(rows, torch.unique_consecutive(groups, return_counts=True)[1].tolist())), totals
        )

    def slices(self, call: Call, batch: Batch) -> Answer:
        """Return rows for other workers on this machine.

        ``call.arguments["parts"]`` has (key, names, rows) for each set of rows. The ``value`` of the answer
        has a message for each set, or None if the message is large and doesn't fit into shared memory. The
        driver then requests those rows through Ray.
        """
        row_messages = [
            self.slice(key, names, rows, True, call.iteration) for key, names, rows in call.arguments["parts"]
        ]
        return Answer(value=[inline(row_message) for row_message in row_messages])

    def hold(self, call: Call, batch: Batch) -> Answer:
        """Store ``batch`` unchanged."""
        return self._keep(call, batch)

    def summarise(self, call: Call, batch: Batch) -> Answer:
        """Return the iteration's summary, computed from stored records.

        ``call.arguments["records"]`` maps a shard's key to the names of its columns, and
        ``call.arguments["judged"]`` says which columns are scores from rewards.
        """
        records = [(names, self.store.get(key)) for key, names in call.arguments["records"].items()]
        columns = {name: batch.select(name) for names, batch in records for name in names}
        return Answer(value=summarise(columns, call.arguments["judged"]))

    def fetch(self, call: Call, batch: Batch) -> Answer:
        """Return an answer whose ``value`` is ``batch`` as bytes.

        ``call.arguments["ranks"]``: the ranks of its rows, to save with them, or None.
        """
        ranks: RowRanks | None = call.arguments["ranks"]
        return Answer(value=packed(batch if ranks is None else ranks.noted(batch)))

    # -- weights
    # --------------------------------------------------------------------------------------------------------

    def weights(self, role: str) -> Payload:
        """Return the trainer's weights, packed as name → tensor with Hugging Face names.

        Only rank 0 returns weights, but all ranks must call this, because they gather the weights together.
        """
        return pack_tensors(dict(self._from_rank0(self._trainer(role, syncing(role)).weights())))

    def _from_rank0(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return (pair for pair in tensors if self.setup.rank == 0)

    def _trainer(self, role: str, needs: Parts) -> Trainer:
        """Return a role's trainer, with the parts ``needs`` loaded into memory."""
        trainer = self.engine.models[role].trainer
        assert trainer is not None
        self.engine.offloads.settle(needs)
        return trainer

    def receive(self, role: str, version: int, weights: Payload) -> int:
        """Load full weights into the generator, and return their size in bytes.

        ``weights``: what the method ``weights`` returned. ``version``: the version of these weights.
        """
        generator = self.engine.models[role].generator
        assert generator is not None
        self.engine.offloads.settle(syncing(role))
        generator.receive(iter(unpack_tensors(weights).items()), version)
        return weights.nbytes

    def follow(self, role: str, other: str, mix: float) -> None:
        """Move this rank's part of a role's weights towards those of another role on the same ranks."""
        self.engine.move(role, other, mix)

    def masters(self, role: str) -> Payload:
        """Return all weights of the trainer, in the precision in which they are kept and with adapters merged.

        Only rank 0 returns weights, but all ranks must call this, because they gather the weights together.
        """
        weights = complete(self._trainer(role, copying(role)))
        return pack_tensors(dict(self._from_rank0(weights.items())))

    def follow_masters(self, role: str, weights: Payload, mix: float) -> int:
        """Move a role's weights towards what ``masters`` returned, and return the size of that in bytes."""
        trainer = self._trainer(role, computing(role))
        assert isinstance(trainer, ShowsMasters)
        follow(trainer, unpack_tensors(weights).items(), mix)
        return weights.nbytes

    def state(self, role: str) -> Payload:
        """Return the trainer's state as bytes. Only rank 0 returns it, but all ranks must call this."""
        return pack_tensors(dict(self._from_rank0(self._trainer(role, copying(role)).state().items())))

    def commit(self, role: str) -> tuple[Payload, int]:
        """Return the trainer's state as bytes, with its size, for an in-memory checkpoint.

        Ray stores the state outside this process.
        """
        payload = self.state(role)
        return payload, payload.nbytes

    def restore(self, role: str, state: Payload) -> None:
        """Restore the trainer to a state returned by ``state``."""
        self._trainer(role, copying(role)).restore(unpack_tensors(state))

    def resize_passes(self, role: str, tokens: int) -> int:
        """Set the trainer's maximum number of tokens per forward pass, and return the previous one."""
        trainer: Any = self.engine.models[role].trainer
        before: int = trainer.resize_passes(tokens)
        return before

    def synchronise(self, role: str, version: int) -> dict[str, Any]:
        """Copy the trainer's weights to the generator on the same ranks, and return metrics of the transfer.

        ``version``: the version of the trainer's weights.
        """
        model, options = self.engine.models[role], self.setup.config.options
        model.version, model.sampled_version = version, -1
        self.engine.offloads.settle(syncing(role))
        if role not in self.same_rank_transfers and movable(model, options.weights):
            run = f"{Path(self.setup.rendezvous).parent.name}-{role}"
            self.same_rank_transfers[role] = SameRankTransfer(
                model, options.weights, run, device_of(options.device), options.verify_every
            )
        if role in self.same_rank_transfers:
            metrics = self.same_rank_transfers[role](version)
            model.sampled_version = version
            return metrics
        model.synchronise()
        return {}

    def passing(self, role: What, step: str, *arguments: Any) -> Any:
        """Run one step of a weight transfer between pools, and return its result.

        ``step``: the name of a method of this rank's Sender or Receiver. The step "begin" creates a new one.
        """
        if step == "begin":
            if role in self.ends:
                self.ends.pop(role).close()
            self.ends[role] = end_of(self.engine.models, role, device_of(self.setup.config.options.device))
        self.engine.offloads.settle(
            following(role.role, role.other) if isinstance(role, Following) else syncing(role)
        )
        return getattr(self.ends[role], step)(*arguments)

    def save(self, role: str, folder: str) -> None:
        """Save the trainer's model as a Hugging Face folder."""
        self._trainer(role, computing(role)).save(Path(folder))

    def moved(self) -> dict[str, float]:
        """Return metrics of the model parts offloaded and reloaded since the last call."""
        return self.engine.offloads.moved()

    def reasons(self) -> dict[Cause, Reason]:
        """For each cause of missing scores, return the first reason."""
        return {**self.rewards.reasons(), **self.environments.reasons()}

    def close(self) -> None:
        """End the processes of rewards and environments."""
        self.rewards.close()
        self.environments.close()


def own_process(raw: bytes, address: str = "") -> Worker:
    """Return the worker for a rank that has its own process.

    ``raw``: the pickled ``Setup``. ``address``: the rendezvous, if the ranks are on several machines.
    """
    setup: Setup = content(raw)
    options = setup.config.options
    guard(sys.stdout, sys.stderr)  # Ray writes these streams to files
    remember(setup.config.values)
    os.environ.update(setup.config.service_variables)
    torch.set_num_threads(setup.threads)
    if setup.ranks > 1:
        interface = _interface(options) if address else LOOPBACK
        join(address or setup.rendezvous, setup.rank, setup.ranks, device_of(options.device), interface)
    return Worker(setup)


def _interface(options: Options) -> Interface:
    from rlflow.cluster.rpc.actor import own_interface  # needs Ray

    return own_interface(options.interface, options.insecure)


_loading = threading.Lock()  # while transformers loads a model, it changes settings of the process


def own_thread(raw: bytes, flow: Flow, store: Any) -> Worker:
    """Return the worker for a rank that is a thread of the driver's process.

    ``raw``: the pickled ``Setup``. ``flow``: the driver's flow object, because a process imports the flow's
    module only once. ``store``: the torch store where the pool's ranks find each other.
    """
    setup: Setup = content(raw)
    group = group_of_threads(store, setup.rank, setup.ranks) if setup.ranks > 1 else None
    torch.set_num_threads(setup.threads)
    with _loading:
        return Worker(setup, flow, group)


def _no_data(count: int) -> Batch:
    raise RuntimeError("workers cannot draw prompts")


OPERATIONS: dict[str, Callable[[Worker, Call, Batch], Answer]] = {
    "generate": Worker.generate,
    "forward": Worker.forward,
    "score": Worker.score,
    "reward": Worker.reward,
    "stage": Worker.stage,
    "encode": Worker.encode,
    "responses": Worker.responses,
    "filled": Worker.filled,
    "cut": Worker.cut,
    "facts": Worker.facts,
    "split": Worker.split,
    "piece": Worker.piece,
    "merge": Worker.merge,
    "update": Worker.update,
    "slices": Worker.slices,
    "hold": Worker.hold,
    "summarise": Worker.summarise,
    "fetch": Worker.fetch,
}
