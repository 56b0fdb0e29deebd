"""Null models, and one iteration run eagerly and compiled."""

import hashlib
from pathlib import Path

import pytest
import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.load import load
from rlflow.author.memory import stores
from rlflow.backends.null import Generator, Score, Trainer
from rlflow.compiler.passes import plan
from rlflow.compiler.trace.compile import compile_flow
from rlflow.execution.eager import Role, Session
from rlflow.execution.eager_memory import EagerTable
from rlflow.execution.executor import Executor
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.memory.tables import KeptTable
from rlflow.execution.queues import Queues
from rlflow.execution.role_model import Model
from rlflow.training.protocols import ModelSpec


def prompts_at(start, count):
    batch = Batch.of(
        prompt=[f"p{i}" for i in range(count)],
        answer=["a"] * count,
        prompt_tokens=[[i, 1] for i in range(count)],
        prompt_id=torch.arange(start, start + count) % 7,
    )
    return Batch(Axis.fresh(count, start), batch.data)


class Stream:
    """Prompts at consecutive positions."""

    def __init__(self):
        self.position = 0

    def take(self, count):
        self.position += count
        return prompts_at(self.position - count, count)

    def state(self):
        return {"position": self.position}

    def load(self, state):
        self.position = state["position"]

    def left_out(self, since):
        return {}


class Learner(Trainer):
    """A null trainer that records the rows of its updates."""

    def __init__(self):
        super().__init__(ModelSpec(None))
        self.learned = []

    def update(self, batch, loss, **options):
        self.learned.append((loss.name, options["seed"], digest(batch)))
        return super().update(batch, loss, **options)


def digest(batch):
    """Return a digest of every column: a lost, doubled or moved row changes it."""
    text = repr(
        [(name, str(data.kind), data.padded(batch.axis)) for name, data in sorted(batch.data.items())]
    )
    return hashlib.sha256(f"{batch.axis.keys.tolist()}{text}".encode()).hexdigest()


class World:
    """A flow with null models that runs iterations eagerly or compiled."""

    def __init__(self, flow, queues, hp=None, seed=0, trainer=Learner, generator=Generator):
        self.flow, self.hp = flow, hp
        self.stream = Stream()
        names = flow.parameters.roles
        models = {name: Model(trainer(), generator(ModelSpec(None))) for name in names if name != "reward"}
        self.engine = LocalEngine(
            models,
            {"reward": Score()},
            seed,
            self.stream.take,
            dict(flow.state(hp)) if flow.state else {},
            memory={name: KeptTable(spec) for name, spec in stores(flow.kept(hp)).items()},
        )
        self.executor = Executor(self.engine, queues)
        self.queues = queues

    @property
    def program(self):
        return compile_flow(self.flow, self.hp)

    def compiled(self, count):
        outcome = self.executor.run(plan(self.program), self.stream.take(count))
        self.engine.keep(outcome.state, outcome.memory)
        self.engine.iteration += 1
        return outcome

    def eager(self, count):
        hp = {"hp": self.hp} if self.hp is not None else {}
        return self.flow(
            self.stream.take(count),
            **{name: Role(name, self.engine) for name in self.flow.parameters.roles},
            **{name: EagerTable(name, self.engine) for name in self.flow.parameters.memories},
            **hp,
        )

    @property
    def learned(self):
        return {
            name: model.trainer.learned for name, model in self.engine.models.items() if model.trainer.learned
        }


@pytest.fixture(scope="session")
def flows():
    return load(Path(__file__).parent / "flows.py")


@pytest.fixture
def queues():
    made = Queues()
    yield made
    made.close(seconds=1)


@pytest.fixture
def world(queues):
    return lambda flow, **options: World(flow, queues, **options)


@pytest.fixture
def learner():
    """The trainer class of ``world``, for subclasses."""
    return Learner


@pytest.fixture
def prompts():
    return prompts_at


@pytest.fixture
def row_digest():
    return digest


@pytest.fixture
def eager_metrics(monkeypatch):
    """The metrics of the last eager iteration."""
    seen = {}
    log = Session.log

    def logged(self, *of):
        log(self, *of)
        seen.clear()
        seen.update(self.metrics)

    monkeypatch.setattr(Session, "log", logged)
    return seen


@pytest.fixture(autouse=True)
def one_thread():
    assert torch.get_num_threads() == 1
