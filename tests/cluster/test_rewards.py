"""A reward model with its own folder is loaded only where its rewards run."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from keyed import keyed
from transformers import AutoConfig, AutoModelForSequenceClassification

import rlflow
import rlflow.data.tasks
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import SOURCE, row, text
from rlflow.author.figures import Figure, Of
from rlflow.author.load import load_flow
from rlflow.cluster.calls import Calls, ShardLedger
from rlflow.cluster.cluster_engine import _on_common_axes
from rlflow.cluster.rpc.message import Answer
from rlflow.cluster.worker import Worker
from rlflow.config.flags import flat
from rlflow.config.roles.bound import bind_roles
from rlflow.config.roles.opened_data import open_dataset
from rlflow.config.roles.rewards import ModelReward, RewardNames, Rewards
from rlflow.execution.engine import HERE
from rlflow.execution.row_figures import health
from rlflow.runs.api import resolve_config
from rlflow.runs.directory import FILE
from rlflow.runs.planning import place_roles
from rlflow.runs.pools import worker_setups
from rlflow.runs.prepare import compile_with_data, trace_options

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags of a run whose reward is a random model with the policy's tokenizer."""
    folder = shutil.copytree(FOLDER, tmp_path_factory.mktemp("judge") / "judge")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(FOLDER, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return {
        "model": str(FOLDER),
        "data": "chain_sum",
        "reward": [str(folder)],
        "prompts": 4,
        "held_out": 0,
        "hp.max_tokens": 4,
    }


@pytest.fixture
def rank_setups(flags):
    """The setups that the ranks of two pools get."""
    flow = load_flow("grpo")
    config, hp = resolve_config(flow, None, flat(flags | {"pools": "train=1,rollout=1"}))
    data = open_dataset(flow, config)
    rewards = Rewards(RewardNames.of(config, flow), data, config.options, config.tokenizer_folder)
    program = compile_with_data(flow, hp, trace_options(config.options, {}, data, rewards))
    where = place_roles(program, bind_roles(program.graph, config), config).placement
    setups = worker_setups(
        program, config, data, trace_options(config.options, {}, data, rewards), {"actor": 1}
    )
    yield setups.of_pools(where, torch.get_num_threads(), dict.fromkeys(where.pools, ""))
    rewards.close()


@pytest.mark.parametrize(("pool", "loads"), [("train", 0), ("rollout", 1)])
def test_a_rank_loads_the_reward_models_that_score_on_its_pool(monkeypatch, rank_setups, pool, loads):
    loaded, load = [], ModelReward.load
    monkeypatch.setattr(ModelReward, "load", lambda model, *args: (loaded.append(model), load(model, *args)))
    worker = Worker(rank_setups[pool][0])
    worker.close()
    assert len(loaded) == loads


def test_reward_model_scores_equal_those_of_a_single_process(flags):
    found = []
    for pools in ({}, {"pools": "train=1@threads,rollout=1@threads"}):
        roles = rlflow.roles("grpo", **flags, threads=1, **pools)
        try:
            prepared, actor, reward = roles.prepared, roles["actor"], roles["reward"]
            batch = actor.generate(roles.take(), samples=2, max_tokens=4)
            # more bytes on the pool that trains
            batch |= actor.logprobs(batch, gives=("logprobs", "entropy"))
            eager = prepared.engine.fetch(reward(batch))["scores"].tolist()
            prepared.engine.finished()
            found.append(
                (
                    eager,
                    prepared.executor.run(prepared.plan, roles.take()).metrics[
                        Figure(Of.REWARD, "mean", "reward", "reward")
                    ],
                )
            )
        finally:
            roles.close()
    assert found[0] == found[1]


def test_lines_printed_by_rewards_arrive_with_the_next_answer():
    answer = Answer(3, printed=b"judging 7\n")
    assert Answer.unpacked(answer.packed()).printed == b"judging 7\n"
    heard = []
    ledger = ShardLedger(())
    ledger.on_output = heard.append
    pool = SimpleNamespace(name="all")
    Calls({}, ledger, 0).remember(pool, "reward", {0: answer, 1: Answer(4)}, HERE)
    assert heard == [b"judging 7\n"]


JUDGES = '''
def loud(completion):
    print("judging", completion)
    return float(len(completion))

def of_queries(queries, prompts, labels):
    """Of prompts with an even label there is no score."""
    return [None if int(label) % 2 == 0 else float(query.startswith("Q: ") and len(query) > len(prompt))
            for query, prompt, label in zip(queries, prompts, labels, strict=True)]
'''


def recorded(folder, name):
    """Return the lines of a file of a run, without times and without fields that only pools have."""
    rows = map(json.loads, (folder / name).read_text().splitlines())
    return [
        {key: value for key, value in row.items() if "second" not in key and not key.startswith("pool")}
        for row in rows
    ]


def test_sources_are_scored_on_workers_as_in_one_process(
    tmp_path,
):
    (tmp_path / "judges.py").write_text(JUDGES)
    for name, first in (("a", 0), ("b", 100)):
        sums = [{"input": f"{n}+1=", "label": str(n + 1)} for n in range(first, first + 20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    keywords = {
        "data": [f"{tmp_path}/a.jsonl:0.6", f"{tmp_path}/b.jsonl:0.4"],
        "data.template": "Q: {prompt}",
        "held_out": 0,
        "reward": [f"{tmp_path}/judges.py:loud@a", f"{tmp_path}/judges.py:of_queries@b"],
        "prompts": 5,
        "iterations": 2,
        "hp.samples": 2,
    }
    before = set(psutil.Process().children())
    here, there = (
        rlflow.run("grpo", backend="null", out=str(tmp_path / where), threads=1, **keywords, **pools).folder
        for where, pools in (("here", {}), ("there", {"pools": "all=2@threads"}))
    )
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert recorded(there, file) == recorded(here, file)
    assert all(
        {"scores/a", "scores/b", "reward/missing_of_queries/none"} <= row.keys()
        for row in recorded(there, "metrics.jsonl")
    )
    lines = [(run / "notes.txt").read_text().splitlines() for run in (here, there)]
    notes = [[line.partition("  ")[2] for line in each if "missing" in line] for each in lines]
    assert notes[0] == notes[1]
    assert "judges.py:6: the list returned by the function contains None" in notes[0][0]
    printed = [sorted((run / FILE).read_text().splitlines()) for run in (here, there)]
    assert printed[0] == printed[1]
    # two samples of three prompts, twice
    assert [line.partition(" ")[0] for line in printed[1]] == ["judging"] * 12
    assert set(psutil.Process().children()) <= before  # none from the processes that scored


def test_worker_summaries_have_data_sources_next_to_scores():
    prompts = Axis.fresh(2)
    rows = prompts.repeat(2)
    scores = Data(row("float32"), torch.arange(4.0))
    records = {
        SOURCE: Batch(prompts, {SOURCE: Data(text, ("a", "b"))}),
        "scores": Batch(rows, {"scores": scores}),
    }
    (together,) = _on_common_axes(records)
    found = keyed(health({name: together.select(name) for name in together.columns}))
    assert {name: found[name] for name in found if name.startswith("scores/")} == {
        "scores/a": 0.5,
        "scores/b": 2.5,
    }
