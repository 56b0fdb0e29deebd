"""Findings of the checker: one fixture file per kind of mistake. Each wrong line ends in ``# <- code``.

A JSON file next to each fixture lists the expected findings. It omits parts with the values of ``USUAL``. It
may name a staleness, and the number of traces if the mistake needs more than one.
"""

import inspect
import json
import re
from pathlib import Path

import pytest
from sources import ROOT

from rlflow.author.load import load_flow
from rlflow.cli.new import write_new
from rlflow.compiler.check.checker import check
from rlflow.compiler.trace import (
    arguments,
    column_rules,
    environment_rules,
    evaluation,
    graph_rules,
    repeat_rules,
    rules,
    schedule_rules,
    symbols,
)
from rlflow.errors import FlowError, PlanError, Problem

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(path.stem for path in FIXTURES.glob("*.py"))
MODULES = [
    arguments,
    column_rules,
    environment_rules,
    evaluation,
    graph_rules,
    repeat_rules,
    rules,
    schedule_rules,
    symbols,
]
USUAL = {"nearest": None, "variant": "", "severity": "error"}
PARTS = ("code", "found", "expected", "remedy", *USUAL)


def expected(name: str) -> dict[str, object]:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def findings(name: str) -> tuple[Problem, ...]:
    known = expected(name)
    try:
        flow = load_flow(str(FIXTURES / f"{name}.py"))
        reports = [check(flow, staleness=known.get("staleness", 0)) for _ in range(known.get("traces", 1))]
    except (FlowError, PlanError) as error:
        return error.problems
    return reports[-1].problems


def marks(name: str) -> set[tuple[str, int]]:
    lines = (FIXTURES / f"{name}.py").read_text().splitlines()
    return {
        (code, number) for number, line in enumerate(lines, 1) for code in re.findall(r"# <- ([\w-]+)", line)
    }


@pytest.mark.parametrize("name", FILES)
def test_a_mistake_is_reported_at_its_line_with_a_remedy(name):
    found = findings(name)
    assert [{part: getattr(problem, part) for part in PARTS} for problem in found] == [
        USUAL | one for one in expected(name)["findings"]
    ]
    assert {(problem.code, problem.place.line) for problem in found} == marks(name)
    assert {problem.place.path for problem in found} == {str(FIXTURES / f"{name}.py")}


def test_every_fixture_has_expected_findings():
    assert sorted(path.stem for path in FIXTURES.glob("*.json")) == FILES
    assert all(expected(name)["findings"] for name in FILES)


@pytest.mark.parametrize("module", MODULES)
def test_every_code_of_the_tracer_has_a_fixture(module):
    codes = set(re.findall(r'Problem\(\s*"([a-z-]+)"', inspect.getsource(module)))
    shown = {finding["code"] for name in FILES for finding in expected(name)["findings"]}
    # Other test files cover codes of flags, of stages that set state and of environments: test_sampling.py,
    # test_compile.py, binding/test_environments.py
    assert codes - shown <= {"no-such-generate", "state-dispatch", "env-role", "env-lengths"}
    assert codes & shown


def test_findings_are_sorted_by_severity_then_by_line():
    found = findings("many")
    assert [p.severity for p in found] == ["error"] * (len(found) - 1) + ["warning"]
    lines = [p.place.line for p in found if p.severity == "error"]
    assert lines == sorted(lines)


def test_a_finding_names_the_call_and_the_definition():
    problem = findings("column_misspelt")[0]
    assert (problem.place.line, problem.definition.line) == (21, 6)
    assert str(problem).splitlines()[:2] == [
        f"{problem.place}: stage 'place' needs column 'score', but the batch does not have it",
        f"  defined:  {problem.definition}",
    ]


def test_a_call_over_several_lines_is_placed_at_its_first_line(tmp_path):
    source = (FIXTURES / "setting_range_verb.py").read_text()
    broken = source.replace(
        "generate(prompts, samples=0,", "generate(\n        prompts,\n        samples=0,\n       "
    )
    (tmp_path / "broken.py").write_text(broken)
    line = next(number for number, text in enumerate(broken.splitlines(), 1) if "generate(" in text)
    assert {p.place.line for p in check(load_flow(str(tmp_path / "broken.py"))).errors} == {line}


# -- settings, from the file and from flags
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "code", "found", "expected", "nearest"),
    [
        ("--hp.bta", "0.2", "unknown-setting", "bta", "one of beta, samples", "--hp.beta"),
        (
            "--hp.samples",
            "1",
            "setting-range",
            "'1'",
            "int >= 2: input should be greater than or equal to 2",
            None,
        ),
        (
            "--hp.samples",
            "two",
            "setting-range",
            "'two'",
            "int >= 2: input should be a valid integer, unable to parse string as an integer",
            None,
        ),
        (
            "--hp.beta",
            "-1",
            "setting-range",
            "'-1'",
            "float >= 0: input should be greater than or equal to 0",
            None,
        ),
    ],
)
def test_an_unsuitable_flag_is_refused(flag, value, code, found, expected, nearest):
    from rlflow.cli.check import check_flow

    with pytest.raises(PlanError) as caught:
        check_flow(str(FIXTURES / "variant_number.py"), [flag, value])
    problem = caught.value.problems[0]
    assert (problem.code, problem.found, problem.expected, problem.nearest) == (
        code,
        found,
        expected,
        nearest,
    )
    assert problem.remedy


def test_given_settings_and_each_variant_are_checked():
    from rlflow.cli.check import check_flow

    report = check_flow(str(FIXTURES / "variant_number.py"), ["--hp.beta", "0"])
    assert [(p.code, p.variant) for p in report.errors] == [("missing-column", "")]
    assert (
        check_flow(str(FIXTURES / "variant_boolean.py"), ["--hp.use_critic=true"]).errors[0].variant
        == "use_critic=False"
    )


@pytest.mark.parametrize("value", ["groups", "tries"])
def test_zero_groups_or_tries_are_refused(value):
    # torchforge#557: a bound of 0 waited forever
    from rlflow.cli.check import check_flow

    arguments = ["--hp.tries", "2", f"--hp.{value}", "0"] if value == "groups" else ["--hp.tries", "0"]
    found = check_flow(str(FIXTURES / "torchforge_557.py"), arguments).errors
    assert [(p.code, p.found, p.expected) for p in found] == [
        ("setting-range", f"{value}=0", f"{value}: an integer of at least 1")
    ]


def test_zero_staleness_is_synchronous_and_a_negative_one_is_refused():
    # torchforge#557: `max_policy_age: 0` waited forever
    flow = load_flow(str(FIXTURES / "stale.py"))
    assert check(flow, staleness=0).ok
    refused = [p for p in check(flow, staleness=-1).errors if p.code == "staleness-range"]
    assert [(p.found, p.remedy) for p in refused] == [("--staleness -1", "--staleness 0")]


def test_staleness_is_accepted_if_the_loss_corrects_for_it():
    assert check(load_flow("ppo"), staleness=3).ok
    assert check(load_flow("dapo"), staleness=3).ok


def test_encoded_rows_are_not_stale_and_need_no_correction(tmp_path):
    (tmp_path / "taught.py").write_text(
        """from rlflow import encode, flow, loss, truncated_weights

@loss(unrewarded="answers are demonstrations")
def imitation(new):
    return -new.logprobs

@loss(unrewarded="the rows are weighed")
def weighed(new, weights):
    return -new.logprobs * weights

@flow
def taught(prompts, actor):
    batch = actor.generate(prompts, samples=2, max_tokens=8)
    batch |= actor.logprobs(batch)
    actor.update(batch | truncated_weights(batch, cap=2.0), weighed)
    actor.update(encode(prompts, "answer", actor), imitation)
"""
    )
    flow = load_flow(str(tmp_path / "taught.py"))
    assert check(flow, staleness=1).ok
    text = (tmp_path / "taught.py").read_text()
    (tmp_path / "stale.py").write_text(text.replace('encode(prompts, "answer", actor)', "batch"))
    assert [p.code for p in check(load_flow(str(tmp_path / "stale.py")), staleness=1).errors] == [
        "stale-uncorrected"
    ]


@pytest.mark.parametrize(("corrects", "codes"), [("weights", []), ("advantages", ["stale-uncorrected"])])
def test_samples_joined_with_encoded_rows_need_a_correction(tmp_path, corrects, codes):
    (tmp_path / "mixed.py").write_text(
        f"""from rlflow import compare, concat, encode, flow, loss, truncated_weights

@loss
def mixed(new, {corrects}):
    return -new.logprobs * {corrects}

@flow
def joined(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=8)
    shown = encode(prompts, "answer", actor)
    both = concat(
        batch | reward(batch), shown | reward(shown), fill={{"sampled_logprobs": 0.0}}, groups="prompts"
    )
    both |= compare(both)
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=2.0)
    actor.update(both, mixed)
"""
    )
    found = check(load_flow(str(tmp_path / "mixed.py")), staleness=1).errors
    assert [p.code for p in found if p.code.startswith("stale")] == codes


def test_a_variant_with_a_refused_setting_is_dropped(tmp_path):
    # With `tries` at 0 repeat is refused. Nobody means that value, so the checker does not report what else
    # it breaks.
    source = (FIXTURES / "torchforge_557.py").read_text().replace("tries: int = 0", "tries: int = 3")
    (tmp_path / "fine.py").write_text(source)
    assert check(load_flow(str(tmp_path / "fine.py"))).problems == ()


def test_a_shipped_algorithm_has_no_findings():
    files = sorted((ROOT / "algorithms").glob("[!_]*.py"))
    assert files
    for path in files:
        assert [p for p in check(load_flow(str(path))).problems if p.severity != "note"] == [], path


def test_a_file_written_by_new_passes(tmp_path):
    write_new(tmp_path / "mine.py")
    assert check(load_flow(str(tmp_path / "mine.py"))).problems == ()
