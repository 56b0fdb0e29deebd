"""How the halves of roles lie on their pools: which ranks of a tensor-parallel sampler are a team."""

from pathlib import Path

import pytest

import rlflow.data.tasks
from rlflow.author.load import load_flow
from rlflow.backends.vllm.parallel import EngineRank
from rlflow.cli.plan import options_of
from rlflow.compiler.placement import Parallel
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import parse_flags
from rlflow.config.roles.roles import bind_roles
from rlflow.errors import PlanError
from rlflow.runs.api import resolve_config
from rlflow.runs.planning import place_across_machines, place_roles

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
DUEL = """
from rlflow import flow, loss

@loss
def reinforce(new, scores): return -scores[:, None] * new.logprobs, {}

@flow
def duel(prompts, actor, rival, reward):
    for role in (actor, rival):
        batch = role.generate(prompts, max_tokens=4)
        batch |= reward(batch)
        role.update(batch, reinforce)
"""
TEAMS = "--actor.generator vllm --actor.trainer fsdp --actor.generator.tensor_parallel 2"
BOTH = f"{TEAMS} {TEAMS.replace('actor', 'rival')}"
LOCAL = BOTH.replace("--rival.trainer fsdp", "--rival.trainer local")


@pytest.fixture
def lies(tmp_path):
    """How the generators of roles, and then their trainers, lie on a pool of four ranks."""
    file = tmp_path / "duel.py"
    file.write_text(DUEL)

    def lies(flags, apart=(), flow="grpo", roles=("actor",)):
        found = load_flow(str(file) if flow == "duel" else flow)
        words = f"--model {FOLDER} --data chain_sum --pools all=4 {flags}".split()
        given, hp = resolve_config(found, None, parse_flags(words))
        program = compile_flow(found, hp, options_of(given))
        placed = place_roles(program, bind_roles(program.graph, given), given)
        where = place_across_machines(placed, program, apart).placement
        return [where.parallelism(role, half) for half in ("generator", "trainer") for role in roles]

    return lies


def test_a_pool_on_several_machines_has_adjacent_ranks_and_a_trainer_that_goes_with_them(lies):
    (sampler, trainer), (apart, alone) = lies(TEAMS), lies(TEAMS, ["all"])
    assert (sampler.order, sampler.teams(4)) == ("outer", [range(0, 4, 2), range(1, 4, 2)])
    assert (apart.order, apart.teams(4)) == ("inner", [range(0, 2), range(2, 4)])
    assert len(trainer.dims) == 4
    assert not trainer.outer  # a mesh ascends
    assert lies(f"{TEAMS} --weights gather")[0].order == "inner"  # whole tensors go to all
    assert alone.dims == ()  # which with adjacent ranks would cost more
    asked = f"{TEAMS} --actor.generator.rank_order outer"
    with pytest.raises(PlanError, match="(?s)ranks of pool 'all' .* have to be adjacent.*--actor.generator.rank_order auto"):
        lies(asked, ["all"])
    assert lies(asked) == [sampler, trainer]


@pytest.mark.parametrize(("flag", "value"), [
    ("generator.rank_order", "inner"), ("generator.tensor_parallel", "4"), ("trainer", "local"), ("lora", "4"), ("zero", "1")])  # fmt: skip
def test_where_nothing_is_saved_or_it_is_asked_for_ranks_are_adjacent(lies, flag, value):
    given = {"generator": "vllm", "trainer": "deepspeed" if flag == "zero" else "fsdp", "generator.tensor_parallel": "2"} | {flag: value}
    assert lies(" ".join(f"--actor.{name} {each}" for name, each in given.items()))[0].order == "inner"


def test_adapters_beside_tensor_parallelism_are_refused_before_anything_starts(lies):
    with pytest.raises(PlanError, match=r"^adapters are not split by tensor parallelism\n  found: +--lora 4\n"):
        lies(f"{TEAMS} --actor.trainer.tensor_parallel 2 --actor.lora 4")


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (8, 4), (12, 3), (4, 4), (2, 1)])
def test_vllm_takes_the_ranks_that_are_asked_with_the_same_rows(ranks, size):
    for outer in (False, True):
        teams = [list(team) for team in Parallel(size, outer=outer).teams(ranks)]
        assert EngineRank(0, ranks, size, outer, "a run").engines == teams


def test_roles_that_share_processes_have_their_ranks_in_one_order(lies):
    both = [each.order for each in lies(BOTH, flow="duel", roles=("actor", "rival"))]
    assert both[:2] == ["outer", "outer"]
    mixed = lies(LOCAL, flow="duel", roles=("actor", "rival"))
    assert [each.order for each in mixed[:2]] == ["inner", "inner"]
    with pytest.raises(PlanError, match="role 'actor' together have to be adjacent"):
        lies(f"{LOCAL} --actor.generator.rank_order outer", flow="duel", roles=("actor", "rival"))


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


@pytest.mark.parametrize(("dispatch", "pure", "pools", "refused"), [
    ("RANK0", False, "all=2", True), ("DP_COMPUTE", False, "all=2", True), ("ALL", False, "all=2", False),
    ("RANK0", True, "all=2", False), ("RANK0", False, "all=1", False), ("RANK0", False, "", False),
    ("RANK0", False, "actor=1,rest=2 --actor.pool actor --reward.pool rest", False),
])  # fmt: skip
def test_a_stage_that_changes_weights_does_so_on_every_rank(tmp_path, dispatch, pure, pools, refused):
    (tmp_path / "changes.py").write_text(CHANGES.format(dispatch=dispatch, pure=pure))
    found = load_flow(str(tmp_path / "changes.py"))
    given, hp = resolve_config(found, None, parse_flags(f"--backend null {f'--pools {pools}' if pools else ''}".split()))
    program = compile_flow(found, hp, options_of(given))
    try:
        place_roles(program, bind_roles(program.graph, given), given)
        problems = []
    except PlanError as error:
        problems = error.problems
    assert [(problem.code, problem.found) for problem in problems] == (
        [("lone-change", f"dispatch={dispatch}, pure=False")] if refused else [])
