"""Workers of a run in this process: everything of a run on pools but Ray, its processes and torch's group of the ranks."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

import rlflow
from rlflow.cluster import engine as cluster_engine
from rlflow.cluster.rpc.pool import Future, Pool
from rlflow.cluster.rpc.streams import Streams
from rlflow.cluster.setup import FlowSource, by_value
from rlflow.cluster.worker import Worker
from rlflow.execution.lanes import Lanes
from rlflow.passes.lanes import room_of
from rlflow.runs import pools


@dataclass(frozen=True)
class Reference:
    """In place of Ray's: what a call gave or raised."""

    value: Any = None
    error: BaseException | None = None

    @classmethod
    def to(cls, function, *args):
        try:
            return cls(function(*(arg.value if isinstance(arg, Reference) else arg for arg in args)))
        except Exception as error:
            return cls(error=error)


class Answers(Future):
    """Of calls that have ended when they are asked for."""

    def done(self):
        return True

    def _look(self, seconds):
        failed = [(at, ref.error) for at, ref in zip(self.at, self.refs, strict=True) if ref.error is not None]
        if failed:
            raise self._judged(failed)
        return [ref.value for ref in self.refs]


class StreamsHere(Streams):
    """Of calls each of whose answers is computed when it is asked for."""

    def _look(self, seconds):
        return [next(stream) for stream in self.refs]


class PoolHere(Pool):
    """Ranks whose objects lie in this process, and which answer at once. ``answers``: of all frames that were run, as they came."""

    def __init__(self, name, held):
        super().__init__(name, held)
        self.answers = []

    def near(self, rank):
        return True

    def send(self, rank, method, *args, group="cpu", answers=1):
        return Reference.to(getattr(self.actors[rank], method), *args)

    def run(self, rank, frame, transfers, group):
        self.answers.append(Reference.to(self.actors[rank].run, frame, *transfers))
        return self.answers[-1]

    def run_chunks(self, rank, frame, transfers, group):
        return map(Reference, self.actors[rank].run_chunks(frame, *(transfer.value for transfer in transfers)))

    def short_call(self, what, frames, seconds):
        return self.future(what, [(rank, self.run(rank, frame, (), "cpu")) for rank, frame in frames.items()], seconds, list)

    def future(self, method, refs, seconds, merge, limit=None):
        return Answers(method, [self.at(rank) for rank, _ in refs], [ref for _, ref in refs], seconds, merge, self.watcher, limit)


def _worker(setup, flow):
    pickled = FlowSource(setup.flow.path, setup.flow.name, pickled=by_value(flow))  # its file would name its dispatch modes once more
    worker = Worker(replace(setup, flow=pickled, ranks=1))  # alone it joins no group, which models of the null backend do not need
    worker.setup = setup
    return worker


def roles_here(monkeypatch, flow, **keywords):
    """What ``rlflow.roles`` gives of a run on pools, whose workers are in this process."""

    def on_pools(plan, placed, setups, prompts, watchdog, note):
        threads, placement = torch.get_num_threads(), plan.placement
        with ExitStack() as started:
            there = setups.of_pools(placement, threads, dict.fromkeys(placement.pools, "/nowhere/meeting"), plan.residency)
            held = {name: PoolHere(name, [_worker(setup, plan.program.flow) for setup in ranks]) for name, ranks in there.items()}
            lanes = Lanes(room_of(placement))
            for worker in (worker for pool in held.values() for worker in pool.actors):
                started.callback(worker.close)
            started.callback(lanes.close)
            engine = pools.engine_of(plan, placed.options, prompts, held)
            return pools.Runtime(plan, engine, lanes, lambda: pools.reasons(held), started.pop_all().close)

    monkeypatch.setattr(pools, "on_pools", on_pools)
    monkeypatch.setattr(cluster_engine, "Streams", StreamsHere)
    return rlflow.roles(flow, backend="null", **keywords)
