"""Findings about unsuitable flags. Command lines of real runs are checked with the null backend."""

import pytest

from rlflow.author.load import load_flow
from rlflow.cli.check import check_flow, check_names
from rlflow.compiler.graph.model import RoleUse
from rlflow.config.backend_names import SHIPPED, role_types, setting_types, untouched
from rlflow.config.flags import sort_values
from rlflow.config.roles.bound import Sides, bind
from rlflow.errors import PlanError

ACTOR = RoleUse("actor", trained=True, generates=True)


@pytest.mark.parametrize(
    "flags", [["--lr", "nan"], ["--lr", "-1"], ["--actor.lr", "nan"], ["--actor.trainer.lr", "nan"]]
)
@pytest.mark.parametrize("backend", ["local", "null"])
def test_check_validates_backend_values_under_the_given_flag(flags, backend):
    with pytest.raises(PlanError, match=rf"(?s){flags[0][2:]}' does not fit.*float >= 0.*change {flags[0]}$"):
        check_flow("grpo", [*flags, "--backend", backend])


def test_the_null_backend_takes_the_settings_of_all_shipped_backends():
    real = {name for backend in SHIPPED for name in setting_types(backend)}
    assert {"lr", "tensor_parallel", "zero", "batch_tokens", "longest"} <= real
    assert real <= set(role_types({"trainer": "null", "generator": "null"}))
    assert untouched({"trainer": "local", "generator": "vllm"}) == {}
    assert {"trainer.lr", "lr"} <= set(untouched({"trainer": "null", "generator": "local"}))
    assert "generator.lr" not in untouched({"trainer": "null", "generator": "local"})


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"lr": "1e-5", "zero": "2", "actor.max_num_seqs": "8"}, True),
        ({"lr": "nan"}, False),
        ({"zero": "9"}, False),
        ({"no_such": "1"}, False),
    ],
)
def test_a_real_command_is_checked_with_the_null_backend(values, fits):
    given = sort_values({"backend": "null"} | values, ["actor"])
    if fits:
        assert bind({ACTOR: Sides(True, True)}, given)["actor"].trainer.backend == "null"
        return check_names(given, load_flow("grpo"), ["actor"])
    for judge in (
        lambda: bind({ACTOR: Sides(True, True)}, given),
        lambda: check_names(given, load_flow("grpo"), ["actor"]),
    ):
        with pytest.raises(PlanError):
            judge()


@pytest.mark.parametrize("value", ["99999999999999999999", "-99999999999999999999"])
def test_whole_numbers_must_fit_into_64_bits(value):
    with pytest.raises(PlanError, match="64 bits|>= 0"):
        sort_values({"seed": value}, [])
    assert sort_values({"seed": str(2**63 - 1)}, []).options.seed == 2**63 - 1
