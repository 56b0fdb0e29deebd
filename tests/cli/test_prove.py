"""`rlflow prove` from the command line."""

import pytest

from rlflow.cli.main import exit_code
from rlflow.cli.prove import split_plans
from rlflow.errors import PlanError


def test_flags_of_each_plan_are_separated_from_shared_flags():
    assert split_plans(["--as", "--stream 1", "--seed", "3", "--as=--stream 4"]) == (
        ["--stream 1", "--stream 4"],
        ["--seed", "3"],
    )
    with pytest.raises(PlanError, match="rlflow prove compares exactly two plans"):
        split_plans(["--as", "--stream 1"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "code", "says"),
    [
        ("--stream 4", 0, "proved"),
        ("--seed 1", 2, "falsified"),
        ("--actor.micro_tokens 200", 0, "proved"),
        ("--pools all=2@threads", 0, "proved"),
        ("--actor.generator vllm", 0, "unproved"),
    ],
)
def test_two_plans_agree_or_differ_from_a_column_on(capsys, plan, code, says):
    small = [
        "--threads",
        "1",
        "--prompts",
        "4",
        "--hp.samples",
        "4",
        "--hp.max_tokens",
        "4",
        "--hp.minibatch",
        "16",
    ]
    found, printed = (
        exit_code(["prove", "grpo", *small, "--as", "--stream 1", "--as", plan]),
        capsys.readouterr().out,
    )
    assert found == code, printed
    assert printed.splitlines()[-1].startswith(says)
