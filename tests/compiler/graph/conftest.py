"""Graphs shared by the tests of this folder."""

import pytest

from rlflow.author.load import load, load_flow
from rlflow.compiler.trace.compile import compile_flow

REPEATED = """
from dataclasses import dataclass

from rlflow import RANK0, flow, group_mean, loss, repeat, scalar, stage


@dataclass(frozen=True)
class Settings:
    groups: int = 4
    limit: float = float("inf")


@stage(gives="keep", rows="group")
def mixed(scores, group, bar):
    return scores > bar


@stage(gives={"bar": scalar("float32")}, dispatch=RANK0)
def raise_bar(scores, bar, *, limit):
    return min(bar + scores.mean(), limit)


@loss
def policy_loss(new, logprobs, scores):
    return -(new.logprobs - logprobs) * scores[:, None], {}


@flow(state=lambda hp: {"bar": 0.25})
def repeated(prompts, actor, reward, hp=Settings()):
    def body(fresh):
        rows = actor.generate(fresh, samples=2, max_tokens=4, stop=("\\n", "#"))
        rows |= reward(rows)
        return rows | mixed(rows)

    batch = repeat(body, prompts, groups=hp.groups, tries=3)
    batch |= actor.logprobs(batch)
    batch |= raise_bar(batch, limit=hp.limit)
    actor.update(batch, policy_loss)
"""


@pytest.fixture(scope="session")
def ppo():
    return compile_flow(load_flow("ppo")).graph


@pytest.fixture(scope="session")
def repeated_text():
    return REPEATED


@pytest.fixture(scope="session")
def graph_of(tmp_path_factory):
    """Return the graph of a flow's text. Each call writes the text to its own folder."""

    def graph_of(text, name="algorithm.py"):
        path = tmp_path_factory.mktemp("algorithm") / name
        path.write_text(text)
        flow = next(value for value in vars(load(path)).values() if type(value).__name__ == "Flow")
        return compile_flow(flow).graph

    return graph_of


@pytest.fixture(scope="session")
def repeated(graph_of):
    return graph_of(REPEATED)
