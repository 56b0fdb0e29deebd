"""The placement of role sides on their pools, and impossible placements."""

from pathlib import Path

import pytest

import rlflow.data.tasks
from rlflow.author.load import load_flow
from rlflow.cli.plan import options_of
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import parse_flags
from rlflow.config.roles.bound import bind_roles
from rlflow.errors import PlanError
from rlflow.runs.api import resolve_config
from rlflow.runs.planning import place_roles

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
TEAMS = "--actor.generator vllm --actor.trainer fsdp --actor.generator.tensor_parallel 2"


def test_adapters_with_tensor_parallelism_are_refused_early():
    words = (
        f"--model {FOLDER} --data chain_sum --pools all=4 {TEAMS} --actor.trainer.tensor_parallel 2 "
        "--actor.lora 4"
    ).split()
    found = load_flow("grpo")
    given, hp = resolve_config(found, None, parse_flags(words))
    program = compile_flow(found, hp, options_of(given))
    with pytest.raises(
        PlanError, match=r"^adapters cannot be combined with tensor parallelism\n  found: +--lora 4\n"
    ):
        place_roles(program, bind_roles(program.graph, given), given)


CHANGES = """
from rlflow import ALL, DP_COMPUTE, RANK0, flow, loss, stage

@stage(on="actor", dispatch={dispatch}, pure={pure})
def shrink(actor, scores): pass

@loss
def reinforce(new, scores): return -scores[:, None] * new.logprobs, {{}}

@flow
def changes(prompts, actor, reward):
    batch = actor.generate(prompts, max_tokens=4)
    batch |= reward(batch)
    actor.update(batch, reinforce)
    shrink(batch)
"""


@pytest.mark.parametrize(
    ("dispatch", "pure", "pools", "refused"),
    [
        ("RANK0", False, "all=2", True),
        ("DP_COMPUTE", False, "all=2", True),
        ("ALL", False, "all=2", False),
        ("RANK0", True, "all=2", False),
        ("RANK0", False, "all=1", False),
        ("RANK0", False, "", False),
        ("RANK0", False, "actor=1,rest=2 --actor.pool actor --reward.pool rest", False),
    ],
)
def test_a_stage_changes_weights_on_every_rank(tmp_path, dispatch, pure, pools, refused):
    (tmp_path / "changes.py").write_text(CHANGES.format(dispatch=dispatch, pure=pure))
    found = load_flow(str(tmp_path / "changes.py"))
    given, hp = resolve_config(
        found, None, parse_flags(f"--backend null {f'--pools {pools}' if pools else ''}".split())
    )
    program = compile_flow(found, hp, options_of(given))
    try:
        place_roles(program, bind_roles(program.graph, given), given)
        problems = []
    except PlanError as error:
        problems = error.problems
    assert [(problem.code, problem.found) for problem in problems] == (
        [("lone-change", f"dispatch={dispatch}, pure=False")] if refused else []
    )
