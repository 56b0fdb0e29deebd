"""One rank: the halves of the roles that are placed on its pool, rewards, and the columns that it holds."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlflow.author.loss import Loss
from rlflow.author.stage import Stage
from rlflow.batch import Batch
from rlflow.binding.backends import device_of
from rlflow.binding.models import make_models
from rlflow.binding.rewards import ModelScore, RewardNames, Rewards
from rlflow.binding.roles import BoundRole, Halves, bind_roles
from rlflow.cluster.group import LOOPBACK, join
from rlflow.cluster.health.heartbeat import MARKS
from rlflow.cluster.rpc.actor import Payload, opened, own_interface, packed
from rlflow.cluster.rpc.message import NOTHING, Answer, Call, Index
from rlflow.cluster.rpc.tensors import pack_tensors, unpack_tensors
from rlflow.cluster.setup import Setup
from rlflow.cluster.sharding.store import Shelf, owned
from rlflow.cluster.weights.endpoints import End, end_of
from rlflow.cluster.weights.same_ranks import Moving, movable
from rlflow.columns import Level
from rlflow.execution.apply import apply_piece, apply_stage, merge_pieces
from rlflow.execution.engine import JUDGE, CallOptions, Engine
from rlflow.execution.summary import summarise
from rlflow.execution.tally import PartialMetric
from rlflow.execution.threads import others_alone
from rlflow.memory.mover import MemoryMover
from rlflow.memory.schedule import Parts, computing, copying, learning, syncing
from rlflow.placement import reward_pools
from rlflow.trace.compile import all_nodes
from rlflow.training.learning import RankShare
from rlflow.training.objective import MinibatchTotals
from rlflow.training.protocols import Trainer
from rlflow.training.rows import broken_columns, group_of, mask_counts, token_counts
from rlflow.watch.secrets import guard, remember


class Worker:
    """Carries out calls with an engine of its own, which is the one of a run in one process."""

    def __init__(self, setup: Setup, address: str = "") -> None:
        """address: where ranks on several machines meet."""
        guard(sys.stdout, sys.stderr)  # which Ray keeps in files
        remember(setup.config.values)
        torch.set_num_threads(setup.threads)
        self.setup = setup
        self.program = setup.program()
        self.shelf = Shelf()
        self.moving: dict[str, Moving] = {}
        self.ends: dict[str, End] = {}
        if setup.ranks > 1:
            options = setup.config.options
            interface = own_interface(options.interface, options.insecure) if address else LOOPBACK
            join(address or setup.meeting, setup.rank, setup.ranks, device_of(options.device), interface)
        self.rewards = Rewards(RewardNames.of(setup.config), setup.data, setup.config.options, setup.config.tokenizer_folder)
        self.engine = self._engine()
        others_alone()

    def _engine(self) -> Engine:
        """The models of this pool. A role has here just the half that is placed here."""
        setup, graph = self.setup, self.program.graph
        used = {node.role for node in all_nodes(graph.nodes)}
        roles = bind_roles(graph, setup.config)
        device = device_of(setup.config.options.device)
        dims = {name: setup.placement.lies(name, "trainer").dims for name in roles}
        outer = [name for name in roles if setup.placement.lies(name, "generator").outer]
        keeper = MemoryMover(setup.course)
        made = make_models(roles.values(), setup.config.options, device, setup.updates, self._wanted, keeper.loaded, dims, outer)
        judges = [use.name for use in graph.roles if use.name in used and use.name not in roles]
        scorers: dict[str, Any] = {name: self.rewards.scorer(name) for name in judges}
        options = setup.config.options
        engine = Engine(made, scorers, options.seed, _no_data, reward_timeout=options.reward_timeout, keeper=keeper)
        scorers |= {name: ModelScore(engine, name) for name, role in roles.items() if role.use.rewards}
        if (judge := self.rewards.judge()) is not None:
            scorers[JUDGE] = judge
        where = reward_pools(graph, setup.placement)
        self.rewards.load_models(device, [role for role, pools in where.items() if setup.pool in pools])
        return engine

    def _wanted(self, role: BoundRole) -> Halves:
        """Which halves of a role are placed on this pool."""
        placement, pool = self.setup.placement, self.setup.pool
        return Halves(placement.trainers.get(role.name) == pool, placement.generators.get(role.name) == pool)

    # -- columns -----------------------------------------------------------------------------------------------------------------

    def put(self, key: int, payload: Payload, iteration: int) -> None:
        """Keep a shard that comes from the driver."""
        self.shelf.put(key, owned(opened(payload)), iteration)

    def load(self, key: int, payload: Payload, iteration: int) -> Answer:
        """The same, for a driver that does not know what is in it."""
        return self._keep(Call("load", key, NOTHING, iteration), owned(opened(payload)))

    def slice(self, key: int, names: tuple[str, ...], rows: Index | None) -> Payload:
        return self.shelf.slice(key, names, rows)

    def forget(self, keys: tuple[int, ...]) -> None:
        self.shelf.forget(keys)

    def clear(self, iteration: int) -> None:
        """Forget what is there for this iteration and those before it."""
        self.shelf.clear(iteration)

    def held(self) -> int:
        """How many shards there are."""
        return len(self.shelf)

    # -- calls -------------------------------------------------------------------------------------------------------------------

    def run(self, frame: bytes | memoryview, *transfers: Payload) -> bytes | Answer:
        """Carry out one operation of the driver's."""
        call = Call.unpacked(frame)
        self.shelf.forget(call.forget)
        with MARKS.during(call):
            start = time.time()
            batch = self.shelf.batch(call.inputs, transfers)
            return OPERATIONS[call.op](self, call, batch)._replace(ran=(start, time.time())).packed()

    def run_chunks(self, frame: bytes | memoryview, *transfers: Payload) -> Iterator[bytes | Answer]:
        """Sample rows, and answer for each chunk as soon as it is there, under a key of its own and with its rows, and then for all."""
        call = Call.unpacked(frame)
        self.shelf.forget(call.forget)
        role, sampling, seed, into, keys = (call.arguments[name] for name in ("role", "sampling", "seed", "into", "keys"))
        with MARKS.during(call):
            start = time.time()
            batch = self.shelf.batch(call.inputs, transfers)
            rows = self.engine.sample_chunks(role, batch, sampling, seed, into)
            for key, chunk in zip(keys, itertools.islice(rows, into.count), strict=True):
                assert chunk.axis.index is not None
                answer = self._keep(call._replace(key=key), chunk)._replace(value=chunk.axis.index.numpy())
                yield answer._replace(ran=(start, start := time.time())).packed()
            yield self._keep(call, next(rows))._replace(ran=(start, time.time())).packed()

    def _keep(self, call: Call, batch: Batch, tallies: Mapping[str, PartialMetric] | None = None) -> Answer:
        """The answer for a batch that stays here; scalars go along."""
        scalars = {name: data for name, data in batch.data.items() if data.kind.level is Level.SCALAR}
        kept = Batch(batch.axis, {name: data for name, data in batch.data.items() if name not in scalars})
        self.shelf.put(call.key, kept, call.iteration)
        lengths = {data.kind.level.value: data.lengths.numpy() for data in kept.data.values() if data.lengths is not None}
        columns = {name: (data.kind, data.nbytes) for name, data in kept.data.items()}
        return Answer(call.key, len(kept), columns, lengths, scalars, tallies or {})

    def generate(self, call: Call, batch: Batch) -> Answer:
        role, sampling, seed = (call.arguments[name] for name in ("role", "sampling", "seed"))
        rows = self.engine.sample(role, batch, sampling, seed)
        return self._keep(call, Batch(batch.axis.repeat(sampling.samples), rows.data))

    def forward(self, call: Call, batch: Batch) -> Answer:
        role, want, ahead = (call.arguments[name] for name in ("role", "want", "ahead"))
        return self._keep(call, self.engine.forward(role, want, batch, CallOptions(ahead=ahead)))

    def score(self, call: Call, batch: Batch) -> Answer:
        return self._keep(call, self.engine.score(call.arguments["role"], batch))

    def reward(self, call: Call, batch: Batch) -> Answer:
        scores, tallies = self.engine.reward(call.arguments["role"], batch)
        return self._keep(call, scores, tallies)

    def stage(self, call: Call, batch: Batch) -> Answer:
        stage = self._stage(call)
        result, tallies = apply_stage(stage, batch, call.arguments["settings"], call.arguments["seed"], self._on(stage))
        return self._keep(call, result, tallies)

    def _stage(self, call: Call) -> Stage:
        stage = self.program.functions[call.arguments["function"]]
        assert isinstance(stage, Stage)
        return stage

    def _on(self, stage: Stage) -> Trainer | None:
        """The trainer that a stage is given, with all that it has."""
        return self._trainer(stage.on, learning(stage.on)) if stage.on else None

    def split(self, call: Call, batch: Batch) -> Answer:
        """The pieces of a mode of the author's own, each kept here, with the keys of its rows."""
        split = self._stage(call).dispatch.split
        assert split is not None
        pieces = split(batch, self.setup.ranks)
        keys = call.arguments["keys"]
        if len(pieces) > len(keys):
            raise ValueError(f"found {len(pieces)} pieces, expected at most one for each of {len(keys)} ranks")
        made = [(self._keep(call._replace(key=key), piece), (piece.axis.keys.numpy(), piece.axis.grouped))
                for key, piece in zip(keys, pieces, strict=False)]
        return Answer(call.key, value=made)

    def piece(self, call: Call, batch: Batch) -> Answer:
        stage = self._stage(call)
        result, tallies = apply_piece(stage, batch, call.arguments["settings"], call.arguments["seed"], self._on(stage))
        return self._keep(call, result, tallies)

    def merge(self, call: Call, batch: Batch) -> Answer:
        outputs = [self.shelf.get(key) for key in call.arguments["outputs"]]
        return self._keep(call, merge_pieces(self._stage(call), outputs, batch))

    def facts(self, call: Call, batch: Batch) -> Answer:
        """Of each row: what keeps it from being learned from, its tokens that count, all its tokens, its group. The rows stay for the
        update."""
        bad = broken_columns(batch, self._loss(call))
        facts = torch.stack([bad, mask_counts(batch), token_counts(batch), self._groups(batch)], 1)
        return self._keep(call, batch)._replace(value=facts.numpy())

    def _groups(self, batch: Batch) -> torch.Tensor:
        return batch.data["group"].value if "group" in batch else batch.axis.group_numbers

    def update(self, call: Call, batch: Batch) -> Answer:
        """This rank's rows of each optimizer step: ``steps`` holds (rows within the batch, tokens and rows of the whole minibatch)."""
        loss, role = self._loss(call), call.arguments["role"]
        shares = [self._share(batch, loss, torch.tensor(rows), MinibatchTotals(*totals)) for rows, totals in call.arguments["steps"]]
        trainer = self._trainer(role, learning(role))
        learned = trainer.update_shares(batch, loss, shares, call.arguments["mean"], call.arguments["settings"])
        self.engine.models[role].version += 1
        return Answer(value=learned)

    def _share(self, batch: Batch, loss: Loss, rows: torch.Tensor, totals: MinibatchTotals) -> RankShare:
        """Rows in the order in which the step takes them, whole groups for a loss over groups."""
        if loss.rows != "group" or not len(rows):
            return RankShare(list(torch.split(rows, 1)) if len(rows) else [], totals)
        groups = group_of(batch)[rows]
        return RankShare(list(torch.split(rows, torch.unique_consecutive(groups, return_counts=True)[1].tolist())), totals)

    def _loss(self, call: Call) -> Loss:
        loss = self.program.functions[call.arguments["function"]]
        assert isinstance(loss, Loss)
        return loss

    def hold(self, call: Call, batch: Batch) -> Answer:
        """Keep a batch as it came."""
        return self._keep(call, batch)

    def summarise(self, call: Call, batch: Batch) -> Answer:
        """Of the records that are held under the keys of ``records``, each with its columns."""
        held = [(names, self.shelf.get(key)) for key, names in call.arguments["records"].items()]
        return Answer(value=summarise({name: batch.select(name) for names, batch in held for name in names}))

    def fetch(self, call: Call, batch: Batch) -> Answer:
        return Answer(value=packed(batch))

    # -- weights -----------------------------------------------------------------------------------------------------------------

    def weights(self, role: str) -> Payload:
        """The trainer's weights by Hugging Face name, from rank 0; from others, which only take part, nothing."""
        return pack_tensors(dict(self._from_rank0(self._trainer(role, syncing(role)).weights())))

    def _from_rank0(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return (pair for pair in tensors if self.setup.rank == 0)

    def _trainer(self, role: str, needs: Parts) -> Trainer:
        """A role's trainer, with these of its parts in memory."""
        trainer = self.engine.models[role].trainer
        assert trainer is not None
        self.engine.keeper.settle(needs)
        return trainer

    def receive(self, role: str, version: int, weights: Payload) -> None:
        generator = self.engine.models[role].generator
        assert generator is not None
        self.engine.keeper.settle(syncing(role))
        generator.receive(iter(unpack_tensors(weights).items()), version)

    def state(self, role: str) -> Payload:
        return pack_tensors(dict(self._from_rank0(self._trainer(role, copying(role)).state().items())))

    def commit(self, role: str) -> tuple[Payload, int]:
        """The state, for an object outside of this process, and its bytes."""
        payload = self.state(role)
        return payload, payload.nbytes

    def restore(self, role: str, state: Payload) -> None:
        self._trainer(role, copying(role)).restore(unpack_tensors(state))

    def synchronise(self, role: str, version: int) -> dict[str, Any]:
        """The model has this many updates behind it; the generator beside the trainer takes its weights. Bytes that came by a plan."""
        model, options = self.engine.models[role], self.setup.config.options
        model.version, model.sampled_version = version, -1
        self.engine.keeper.settle(syncing(role))
        if role not in self.moving and movable(model, options.weights):
            run = f"{Path(self.setup.meeting).parent.name}-{role}"
            self.moving[role] = Moving(model, options.weights, run, device_of(options.device), options.verify_every)
        if role in self.moving:
            moved, lies = self.moving[role](version), self.setup.placement.lies(role, "generator")
            model.sampled_version = version
            return moved | ({"order": lies.order} if lies.tensor > 1 else {})
        model.synchronise()
        return {}

    def passing(self, role: str, step: str, *told: Any) -> Any:
        """A step of weights on their way between this pool and another: a method of this rank's end of it, a new one where it begins."""
        if step == "begin":
            if role in self.ends:
                self.ends.pop(role).close()
            self.ends[role] = end_of(self.engine.models[role], device_of(self.setup.config.options.device))
        self.engine.keeper.settle(syncing(role))
        return getattr(self.ends[role], step)(*told)

    def save(self, role: str, folder: str) -> None:
        self._trainer(role, computing(role)).save(Path(folder))

    def moved(self) -> dict[str, float]:
        """What of the models left this rank's memory and came back since this was last asked."""
        return self.engine.keeper.told()

    def reasons(self) -> dict[str, str]:
        return self.rewards.reasons()

    def close(self) -> None:
        self.rewards.close()


def _no_data(count: int) -> Batch:
    raise RuntimeError("a worker has no data of its own")


OPERATIONS: dict[str, Callable[[Worker, Call, Batch], Answer]] = {
    "generate": Worker.generate, "forward": Worker.forward, "score": Worker.score, "reward": Worker.reward, "stage": Worker.stage,
    "facts": Worker.facts, "split": Worker.split, "piece": Worker.piece, "merge": Worker.merge,
    "update": Worker.update, "hold": Worker.hold, "summarise": Worker.summarise, "fetch": Worker.fetch,
}
