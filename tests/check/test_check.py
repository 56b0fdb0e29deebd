"""`rlflow check`: one fixture file per kind of mistake. The line that is meant ends in ``# <- code``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.author.load import load_flow
from rlflow.check.check import check
from rlflow.cli.main import main
from rlflow.cli.new import write_new
from rlflow.errors import FlowError, Place, PlanError, Problem

FIXTURES = Path(__file__).parent / "fixtures"
ROWS = "prompt, answer, prompt_tokens, tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version, group"
COLUMNS = f"columns {ROWS}"
SYMBOLS = "stages, verbs, merges and settings only"
INTO_STAGE = "put the computation inside a @stage"
ONE_AXIS = "columns of the same rows, or row-level ones of the same prompts with one row per prompt"
OWN_ROWS = (
    "merge only what was given for these rows; for a baseline per prompt merge its scores alone: "
    'batch |= reward(greedy, gives="baseline")'
)


def says(code, found, expected, remedy, nearest=None, variant="", severity="error"):
    return {
        "code": code, "found": found, "expected": expected, "remedy": remedy, "nearest": nearest, "variant": variant, "severity": severity,
    }


def merge(name):
    return f"merge the stage that gives it first: batch |= <stage giving '{name}'>(batch)"


FINDINGS = {
    "repeat_rows": [
        says("repeat-rows", "rows of other rows", "rows sampled from the prompts of the body", "ask and join after the repeat"),
    ],
    "rows_lacking": [
        says(
            "rows-lacking", "right: row bool", "a float column, whose missing values are NaN",
            'give it as {"right": row(torch.float32)}',
        ),
    ],
    "stale_chain": [
        says(
            "staleness-chain", "the weights of 'critic'", "between two samplings only what reads nothing that training changes",
            "sample before 'critic.values', or leave --staleness out",
        ),
    ],
    "all_gives_rows": [
        says("all-gives-rows", "bonus", "scalar columns only", "use DP_COMPUTE for rows, or give a scalar"),
    ],
    "ask_column": [
        says("ask-column", "SymbolicBatch", 'ask(batch, "question")', "merge the stage that gives the text, then name its column"),
    ],
    "beyond_80_20_20": [
        says(
            "missing-column", f"{COLUMNS}, scores, logprobs, rewards", "column 'ref_logprobs'", merge("ref_logprobs"),
            nearest="logprobs", variant="use_kl_in_reward=True",
        ),
    ],
    "choose_arguments": [
        says(
            "choose-arguments", "column=None, top='scores', count=None, per='batch'",
            'choose(batch, "hard"), or choose(batch, top="scores", count=2, per="group")',
            "write one of the two forms, with a count of at least 1",
        ),
    ],
    "choose_groups": [
        says("no-groups", "rows of the prompts", "rows made by generate, or pairs",
             'leave per="group" out, or choose among sampled rows'),
    ],
    "column_missing": [
        says("missing-column", f"{COLUMNS}, scores, logprobs", "column 'returns'", merge("returns")),
        says("missing-column", f"{COLUMNS}, scores, logprobs", "column 'values'", merge("values")),
    ],
    "column_misspelt": [
        says("missing-column", f"{COLUMNS}, scores, logprobs", "column 'score'", "read 'scores'", nearest="scores"),
    ],
    "concat_one": [
        says("concat-arguments", "1 batches", "concat(first, second)", "pass each batch by itself"),
    ],
    "file_raises": [
        says("file-raised", "ImportError", "a file that loads", "correct this line", nearest="loss"),
    ],
    "file_stage_option": [
        says("file-raised", "TypeError", "a file that loads", "correct this line"),
    ],
    "flow_parameters": [
        says("flow-parameters", "(roles)", "the data first, then roles", "write def mistaken(prompts, actor, …, hp=Settings())"),
    ],
    "flow_raised": [
        says(
            "flow-raised", "KeyError while the flow was traced", "a flow that can be called on symbolic batches",
            "correct this line; computations on values belong into a @stage",
        ),
    ],
    "flow_settings": [
        says(
            "flow-settings", "hp=('clip', 0.2)", "an object of a frozen dataclass",
            "write @dataclass(frozen=True) over the class, and hp=Settings() as the parameter",
        ),
    ],
    "gives_count": [
        says("gives-count", "gives=('rewards', 'returns')", "1 names, for rewards", "name each column that the stage gives"),
    ],
    "gives_prompt": [
        says(
            "gives-prompt", f"a column '{name}' made by the flow", f"'{name}' from the data, or from ask",
            'give the column another name, such as "question", and sample from ask(batch, "question")',
        )
        for name in ("prompt_tokens", *["prompt"] * 5)
    ],
    "group_dispatch": [
        says("group-dispatch", "keep", 'rows="group" or RANK0', 'write rows="group"'),
    ],
    "group_split": [
        says("group-split", 'rows="row"', 'rows="group" or RANK0', 'write rows="group"', severity="warning"),
    ],
    "joined_kinds": [
        says("joined-kinds", "row float32, token float32", "one kind", 'drop("worth") from one, or rename it'),
    ],
    "leaked_closure": [
        says(
            "leaked-symbol", "a symbolic batch from elsewhere", "batches made by this flow, or given to this body",
            "pass batches through calls; keep none in globals, defaults or closures",
        ),
    ],
    "leaked_global": [
        says(
            "leaked-symbol", "a symbolic batch from elsewhere", "batches made by this flow, or given to this body",
            "pass batches through calls; keep none in globals, defaults or closures",
        ),
    ],
    "many": [
        says("setting-range", "max_tokens=0", "max_tokens: an integer of at least 1", "change max_tokens"),
        says(
            "table-kind", "rewards: row float32", "rewards: token float32",
            "give it a name of your own, or make it of the table's kind",
        ),
        says("missing-column", f"{COLUMNS}, scores, logprobs", "column 'score'", "read 'scores'", nearest="scores"),
        says("unknown-setting", "gama", "one of gamma", "write gamma=", nearest="gamma"),
        says("missing-setting", "nothing", "gamma: a value", "pass gamma= at the call"),
        says("missing-column", f"{COLUMNS}, scores, logprobs, rewards", "column 'values'", merge("values")),
        says("missing-column", f"{COLUMNS}, scores, logprobs, rewards, advantages, difficulty", "column 'returns'", merge("returns")),
        says("setting-range", "epochs=0", "epochs: an integer of at least 1", "change epochs"),
        says("never-read", "difficulty", "a later stage, loss or verb that reads it", "remove it, or read it", severity="warning"),
    ],
    "miles_3125": [
        says("missing-column", f"{COLUMNS}, scores, logprobs, returns", "column 'values'", merge("values"), variant="critic=False"),
        says("optional-absent", "no such column", "column 'values' or none", "nothing, if that is meant", severity="note"),
    ],
    "nemo_rl_1968": [
        says(
            "missing-column", f"{COLUMNS}, scores, logprobs", "column 'ref_logprobs'", merge("ref_logprobs"), nearest="logprobs",
            variant="skip_reference=True",
        ),
    ],
    "never_read": [
        says("never-read", "difficulty", "a later stage, loss or verb that reads it", "remove it, or read it", severity="warning"),
    ],
    "no_flow": [
        says("no-flow", "no function with @flow", "one", "decorate the function of one iteration with @flow"),
    ],
    "no_groups": [
        says("no-groups", "rows of the prompts", "rows made by generate, or pairs", "call it on the batch that generate gives"),
    ],
    "no_groups_loss": [
        says("no-groups", "rows of the prompts", "rows made by generate, or pairs", "pass actor.update the batch that generate gives"),
    ],
    "not_a_loss": [
        says("not-a-loss", "plain_loss", "a function decorated with @loss", "decorate it with @loss"),
        says("missing-column", f"{COLUMNS}, scores, logprobs", "column 'ref_logprobs'", merge("ref_logprobs"), nearest="logprobs"),
    ],
    "not_prompts": [
        says(
            "not-prompts", "rows of a group", "the prompts, or rows that were asked",
            'call actor.generate(prompts, …), or make prompts of the rows: actor.generate(ask(batch, "question"), …)',
        ),
    ],
    "nothing_updated": [
        says("nothing-updated", "no update of any role", "at least one", "end with actor.update(batch, loss, …)"),
    ],
    "optional_absent": [
        says("optional-absent", "no such column", "column 'ref_logprobs' or none", "nothing, if that is meant", severity="note"),
    ],
    "own_column": [
        says(
            "own-column", "score", "a column of the table, or a declared kind", 'declare it: gives={"score": row(torch.float32)}',
            nearest="scores", severity="note",
        ),
    ],
    "positional_setting": [
        says(
            "positional-setting", "the positional parameter 'beta'", f"one of {ROWS}, scores, logprobs",
            "put 'beta' after '*' in the function's parameters and pass it by name: beta=hp.beta",
        ),
    ],
    "positional_unknown": [
        says(
            "missing-column", f"{COLUMNS}, scores, logprobs", "column 'strength'",
            "merge the stage that gives 'strength' first, or put 'strength' after '*' if it is a setting",
        ),
    ],
    "repeat_no_keep": [
        says(
            "repeat-keep", f"{ROWS}, scores", "the group column keep: bool",
            'merge a stage with rows="group" that gives "keep" before the body returns',
        ),
    ],
    "repeat_prompts": [
        says(
            "repeat-prompts", "columns made by the flow: hard", "the prompts",
            "pass the flow's own prompts, and make further columns inside the body",
        ),
    ],
    "repeat_result": [
        says("repeat-result", "NoneType", "a batch with the group column keep", "return the batch"),
    ],
    "repeat_state": [
        says("repeat-state", "bar", "state that is only read", "set it after the repeat"),
    ],
    "repeat_update": [
        says("repeat-update", "actor.update", "sampling, scoring and stages", "update after the repeat"),
    ],
    "replaced_by_rename": [
        says(
            "replaced-unread", "a second 'logprobs'", "a reader between the two, or one of them",
            'rename one of them: gives="…", or drop("logprobs")',
        ),
    ],
    "replaced_in_body": [
        says(
            "replaced-unread", "a second 'scores'", "a reader between the two, or one of them",
            'rename one of them: gives="…", or drop("scores")',
        ),
    ],
    "replaced_unread": [
        says(
            "replaced-unread", "a second 'scores'", "a reader between the two, or one of them",
            'rename one of them: gives="…", or drop("scores")',
        ),
    ],
    "role_unused": [
        says("role-unused", "no verb", "a verb, or none", "nothing, if that is meant", severity="note"),
    ],
    "row_axes": [
        says("row-axes", "columns baseline of other rows", ONE_AXIS, OWN_ROWS),
    ],
    "row_axes_tokens": [
        says("row-axes", "token columns ref_logprobs", ONE_AXIS, OWN_ROWS),
    ],
    "scalar_dispatch": [
        says("scalar-dispatch", "highest under DP_COMPUTE", "RANK0 or ALL", "write dispatch=RANK0"),
    ],
    "setting_missing": [
        says("missing-setting", "nothing", "cap: a value", "pass cap= at the call"),
    ],
    "setting_range_hp": [
        says("setting-range", "-0.2", "float >= 0: input should be greater than or equal to 0", "change the default"),
        says("missing-column", f"{COLUMNS}, scores", "column 'logprobs'", merge("logprobs"), nearest="sampled_logprobs"),
    ],
    "setting_range_update": [
        says("setting-range", "epochs=0", "epochs: an integer of at least 1", "change epochs"),
        says("setting-range", "mean='token'", 'mean: "tokens", "rows", "row-tokens" or a number above 0', "change mean"),
    ],
    "setting_range_verb": [
        says("setting-range", "samples=0", "samples: an integer of at least 1", "change samples"),
        says("setting-range", "temperature=-1", "temperature: a number of at least 0 (0 is greedy)", "change temperature"),
        says("setting-range", "stop='###'", "stop: a tuple of strings", "change stop"),
    ],
    "setting_unknown_loss": [
        says("unknown-setting", "epoch", "one of epochs, minibatch, mean, after", "write epochs=", nearest="epochs"),
    ],
    "setting_unknown_reward": [
        says("unknown-setting", "give", "one of gives", "write gives=", nearest="gives"),
        says("unknown-setting", "temperature", "one of gives", "remove temperature=, or declare it after '*' in the function"),
    ],
    "setting_unknown_stage": [
        says("unknown-setting", "capp", "one of cap", "write cap=", nearest="cap"),
    ],
    "setting_unknown_verb": [
        says(
            "unknown-setting", "max_token", "one of samples, max_tokens, temperature, top_p, top_k, stop", "write max_tokens=",
            nearest="max_tokens",
        ),
        says("missing-setting", "nothing", "max_tokens: an integer of at least 1", "pass max_tokens= at the call"),
    ],
    "single_groups": [
        says("single-groups", "samples=1", "samples of at least 2", "sample more responses per prompt: generate(…, samples=8)"),
    ],
    "single_groups_loss": [
        says("single-groups", "samples=1", "samples of at least 2", "sample more responses per prompt"),
    ],
    "stale": [
        says(
            "stale-uncorrected", "columns logprobs", "a column that depends on sampled_logprobs",
            "add before the update:  batch |= truncated_weights(batch, cap=2.0)\n"
            "            and in the loss:  take `weights` and multiply the value by it",
        ),
    ],
    "stale_repeat": [
        says("staleness-repeat", found, "a body that reads nothing that training changes, but to sample",
             f"call '{node}' after the `repeat`, or leave --staleness out")
        for node, found in (("actor.logprobs", "the weights of 'actor'"), ("below", "the state 'bar'"))
    ],
    "state_raised": [
        says(
            "flow-state", "AttributeError", "a function of the settings that gives numbers by name",
            'write @flow(state=lambda hp: {"beta": hp.beta})',
        ),
    ],
    "state_rows": [
        says("state-rows", "bar: row float32", "bar: scalar float32", "give one number, with dispatch=RANK0"),
    ],
    "symbol_arithmetic": [
        says("symbol-as-value", "a batch used in arithmetic", SYMBOLS, INTO_STAGE),
    ],
    "symbol_comparison": [
        says("symbol-as-value", "a batch used in a comparison", SYMBOLS, "put the decision inside a @stage, or base it on a setting"),
    ],
    "symbol_equality": [
        says("symbol-as-value", "a batch used in a comparison", SYMBOLS, "put the decision inside a @stage, or base it on a setting"),
    ],
    "symbol_if": [
        says("symbol-as-value", "a batch used in a condition", SYMBOLS, "put the decision inside a @stage, or base it on a setting"),
    ],
    "symbol_in_stage": [
        says(
            "not-a-batch", "SymbolicColumn", "a batch",
            "write halved(batch): its parameters' names pick the columns; settings go by name",
        ),
    ],
    "symbol_index": [
        says("symbol-as-value", "a batch used with an index", SYMBOLS, INTO_STAGE),
    ],
    "symbol_len": [
        says("symbol-as-value", "a batch used with len()", SYMBOLS, "base the number on a setting"),
    ],
    "symbol_loop": [
        says("symbol-as-value", "a batch used in a loop", SYMBOLS, "loop over a setting, or inside a @stage"),
    ],
    "symbol_method": [
        says("symbol-as-value", "a batch used with .mean", SYMBOLS, INTO_STAGE),
    ],
    "symbol_number": [
        says("symbol-as-value", "a batch used as a number", SYMBOLS, INTO_STAGE),
    ],
    "symbol_numpy": [
        says("symbol-as-value", "a batch used with .max", SYMBOLS, INTO_STAGE),
    ],
    "symbol_or": [
        says(
            "symbol-as-value", "a batch used with '|' on something that is not a batch", SYMBOLS,
            "merge what a stage gives: batch |= stage(batch)",
        ),
    ],
    "symbol_rows": [
        says("symbol-as-value", "a batch used with .rows()", SYMBOLS, INTO_STAGE),
    ],
    "symbol_torch": [
        says("symbol-as-value", "a batch used in a torch function", SYMBOLS, INTO_STAGE),
    ],
    "symbol_write": [
        says(
            "symbol-as-value", "a batch used as a place to write to", SYMBOLS,
            "a batch does not change: merge what a stage gives with batch |= stage(batch)",
        ),
    ],
    "table_kind": [
        says(
            "table-kind", "rewards: row float32", "rewards: token float32",
            "give it a name of your own, or make it of the table's kind",
        ),
    ],
    "table_kind_of_data": [
        says("table-kind", "answer: row float32", "answer: text", "give it a name of your own, or make it of the table's kind"),
    ],
    "table_kind_renamed": [
        says(
            "table-kind", "rewards: row float32", "rewards: token float32",
            "give it a name of your own, or make it of the table's kind",
        ),
    ],
    "torchforge_557": [
        says("setting-range", "tries=0", "tries: an integer of at least 1", "change tries"),
    ],
    "truncated_ratio": [
        says(
            "truncated-ratio",
            f"sampled_logprobs truncated by 'actor.generate' at {Place(str(FIXTURES / 'truncated_ratio.py'), 13)}, logprobs without",
            "top_p=1 and top_k=0 where they meet in a ratio", "sample without truncation", severity="warning",
        ),
    ],
    "two_flows": [
        says("two-flows", "mistaken, second", "one, or one named", "name one: two_flows.py::mistaken"),
    ],
    "two_heads": [
        says("two-heads", "logprobs, values", "one of logprobs, values, scores", "use two roles"),
    ],
    "unknown_attribute": [
        says("unknown-attribute", "selct", "select, drop, rename, columns", "read columns inside a @stage", nearest="select"),
    ],
    "unknown_lengths": [
        says("unknown-lengths", "rewards, from scores", "a column of token level among its parameters", "add `mask` to its parameters"),
    ],
    "unknown_role": [
        says(
            "unknown-role", "critik", "one of actor, critic, reward", "name a role of the flow in on=, or give the flow that parameter",
            nearest="critic",
        ),
        says("role-parameter", "critic", "critik as the first parameter", "write def ask(critik, …)"),
    ],
    "unknown_verb": [
        says(
            "unknown-verb", "logprob", "generate, logprobs, values, update, actor(batch)",
            'write one of the verbs, or a @stage(on="…") of your own', nearest="logprobs",
        ),
    ],
    "variant_boolean": [
        says("missing-column", f"{COLUMNS}, scores, logprobs", "column 'values'", merge("values"), variant="use_critic=False"),
    ],
    "variant_literal": [
        says("missing-column", f"{COLUMNS}, scores, logprobs", "column 'advantages'", merge("advantages"), variant="baseline='none'"),
    ],
    "variant_number": [
        says(
            "missing-column", f"{COLUMNS}, scores, logprobs", "column 'ref_logprobs'", merge("ref_logprobs"), nearest="logprobs",
            variant="beta=0.0",
        ),
    ],
    "wrong_dtype": [
        says(
            "wrong-kind", "solved: row bool", "solved: row float32",
            "change the stage that gives it, or annotate the parameter with the kind that is meant",
        ),
    ],
    "wrong_level": [
        says(
            "wrong-kind", "scores: row float32", "scores: token float32",
            "change the stage that gives it, or annotate the parameter with the kind that is meant",
        ),
    ],
}
TRACES = {"leaked_global": 2}  # a batch that is kept can be told from the flow's own when the flow is traced again
STALENESS = {"stale": 1, "stale_chain": 1, "stale_repeat": 1}


def findings(name: str) -> tuple[Problem, ...]:
    try:
        flow = load_flow(str(FIXTURES / f"{name}.py"))
        reports = [check(flow, staleness=STALENESS.get(name, 0)) for _ in range(TRACES.get(name, 1))]
    except (FlowError, PlanError) as error:
        return error.problems
    return reports[-1].problems


def marks(name: str) -> set[tuple[str, int]]:
    lines = (FIXTURES / f"{name}.py").read_text().splitlines()
    return {(code, number) for number, line in enumerate(lines, 1) for code in re.findall(r"# <- ([\w-]+)", line)}


def parts(problem: Problem) -> dict[str, object]:
    return {key: getattr(problem, key) for key in says(*[""] * 4)}


@pytest.mark.parametrize("name", FINDINGS)
def test_a_mistake_is_found_at_its_line_with_what_to_write_instead(name):
    found = findings(name)
    assert [parts(problem) for problem in found] == FINDINGS[name]
    assert {(problem.code, problem.place.line) for problem in found} == marks(name)
    assert {problem.place.path for problem in found} == {str(FIXTURES / f"{name}.py")}


def test_every_fixture_has_its_findings():
    assert {path.stem for path in FIXTURES.glob("*.py")} == set(FINDINGS)


def test_errors_come_first_then_warnings_then_notes_by_line():
    found = findings("many")
    assert [p.severity for p in found] == ["error"] * (len(found) - 1) + ["warning"]
    lines = [p.place.line for p in found if p.severity == "error"]
    assert lines == sorted(lines)


def test_a_definition_is_named_beside_the_call():
    problem = findings("column_misspelt")[0]
    assert (problem.place.line, problem.definition.line) == (21, 6)
    assert str(problem).splitlines()[:2] == [
        f"{problem.place}: stage 'place' needs column 'score', which the batch has not",
        f"  defined:  {problem.definition}",
    ]


def test_a_call_over_several_lines_is_placed_at_its_first(tmp_path):
    source = (FIXTURES / "setting_range_verb.py").read_text()
    broken = source.replace("generate(prompts, samples=0,", "generate(\n        prompts,\n        samples=0,\n       ")
    (tmp_path / "broken.py").write_text(broken)
    line = next(number for number, text in enumerate(broken.splitlines(), 1) if "generate(" in text)
    assert {p.place.line for p in check(load_flow(str(tmp_path / "broken.py"))).errors} == {line}


# -- settings, from the file and from flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "code", "found", "expected", "nearest"),
    [
        ("--hp.bta", "0.2", "unknown-setting", "bta", "one of beta, samples", "beta"),
        ("--hp.samples", "1", "setting-range", "'1'", "int >= 2: input should be greater than or equal to 2", None),
        ("--hp.samples", "two", "setting-range", "'two'",
         "int >= 2: input should be a valid integer, unable to parse string as an integer", None),
        ("--hp.beta", "-1", "setting-range", "'-1'", "float >= 0: input should be greater than or equal to 0", None),
    ],
)
def test_a_flag_that_does_not_fit_is_refused(flag, value, code, found, expected, nearest):
    from rlflow.cli.check import check_flow

    with pytest.raises(PlanError) as caught:
        check_flow(str(FIXTURES / "variant_number.py"), [flag, value])
    problem = caught.value.problems[0]
    assert (problem.code, problem.found, problem.expected, problem.nearest) == (code, found, expected, nearest)
    assert problem.remedy


def test_given_settings_are_judged_and_so_is_each_changed_alone():
    from rlflow.cli.check import check_flow

    report = check_flow(str(FIXTURES / "variant_number.py"), ["--hp.beta", "0"])
    assert [(p.code, p.variant) for p in report.errors] == [("missing-column", "")]
    assert check_flow(str(FIXTURES / "variant_boolean.py"), ["--hp.use_critic=true"]).errors[0].variant == "use_critic=False"


@pytest.mark.parametrize("value", ["groups", "tries"])
def test_a_supply_of_rows_that_cannot_come_is_refused_not_waited_for(value):
    # torchforge#557: a bound of 0 waited for ever
    from rlflow.cli.check import check_flow

    arguments = ["--hp.tries", "2", f"--hp.{value}", "0"] if value == "groups" else ["--hp.tries", "0"]
    found = check_flow(str(FIXTURES / "torchforge_557.py"), arguments).errors
    assert [(p.code, p.found, p.expected) for p in found] == [("setting-range", f"{value}=0", f"{value}: an integer of at least 1")]


def test_a_staleness_of_none_is_synchronous_and_a_negative_one_admits_no_rows():
    # torchforge#557: `max_policy_age: 0` waited for ever
    flow = load_flow(str(FIXTURES / "stale.py"))
    assert check(flow, staleness=0).ok
    refused = [p for p in check(flow, staleness=-1).errors if p.code == "staleness-range"]
    assert [(p.found, p.remedy) for p in refused] == [("--staleness -1", "--staleness 0")]


def test_staleness_is_accepted_where_the_loss_corrects_for_it():
    assert check(load_flow("ppo"), staleness=3).ok
    assert check(load_flow("dapo"), staleness=3).ok


def test_a_variant_that_fails_otherwise_is_dropped(tmp_path):
    # with `tries` at 0 repeat is refused: that value is not meant, so what else it breaks is not reported
    source = (FIXTURES / "torchforge_557.py").read_text().replace("tries: int = 0", "tries: int = 3")
    (tmp_path / "fine.py").write_text(source)
    assert check(load_flow(str(tmp_path / "fine.py"))).problems == ()


def test_a_shipped_algorithm_has_no_findings():
    files = sorted((Path(__file__).parents[2] / "algorithms").glob("[!_]*.py"))
    assert files
    for path in files:
        assert [p for p in check(load_flow(str(path))).problems if p.severity != "note"] == [], path


# -- the command -----------------------------------------------------------------------------------------------------------------


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["rlflow", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out + printed.err


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [
        ("many", 2, "refused (9 nodes; 8 errors, 1 warning)"),
        ("never_read", 0, "ok (6 nodes; 1 warning)"),
        ("role_unused", 0, "ok (5 nodes; 1 note)"),
        ("variant_number", 2, "refused (7 nodes; 1 error)"),
    ],
)
def test_errors_exit_with_2_and_warnings_with_0(monkeypatch, capsys, name, code, verdict):
    path = FIXTURES / f"{name}.py"
    ended, printed = command(monkeypatch, capsys, "check", path)
    assert (ended, printed.splitlines()[-1]) == (code, f"{path}: {verdict}")


@pytest.mark.parametrize("name", ["two_flows", "no_flow", "file_raises"])
def test_a_file_without_one_flow_exits_with_2(monkeypatch, capsys, name):
    ended, printed = command(monkeypatch, capsys, "check", FIXTURES / f"{name}.py")
    assert ended == 2
    assert f"{name}.py:{next(iter(marks(name)))[1]}: the file" in printed
    assert "Traceback" not in printed


def test_one_of_two_flows_can_be_named(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "check", f"{FIXTURES / 'two_flows.py'}::mistaken")[0] == 0
    ended, printed = command(monkeypatch, capsys, "check", f"{FIXTURES / 'two_flows.py'}::mistakn")
    assert ended == 2
    assert "nearest:  mistaken" in printed


def test_places_are_never_wrapped(tmp_path):
    folder = tmp_path / ("a_long_folder_name_" * 8)
    folder.mkdir()
    path = folder / "mistaken.py"
    path.write_text((FIXTURES / "many.py").read_text())
    environment = {**os.environ, "COLUMNS": "20", "TERM": "dumb"}
    words = [sys.executable, "-m", "rlflow.cli.main", "check", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert len([line for line in done.stdout.splitlines() if line.startswith(str(path)) and re.search(r"\.py:\d+: ", line)]) == 9


def test_a_file_that_is_no_python_is_placed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "broken.py"
    path.write_text("def flow(:\n")
    ended, printed = command(monkeypatch, capsys, "check", path)
    assert ended == 2
    assert printed.startswith(f"{path}:1: the file cannot be loaded: SyntaxError")


@pytest.mark.parametrize("text", ["raise SystemExit(0)", "import sys; sys.exit('bye')", "1 / 0", "import no_such_package"])
def test_a_file_that_stops_while_it_is_loaded_is_an_error_of_its_line(tmp_path, monkeypatch, capsys, text):
    path = tmp_path / "stops.py"
    path.write_text(f"x = 1\n{text}\n")
    ended, printed = command(monkeypatch, capsys, "check", path)
    assert ended == 2
    assert printed.startswith(f"{path}:2: the file cannot be loaded: ")


def test_a_file_that_is_not_there_names_the_nearest(monkeypatch, capsys):
    ended, printed = command(monkeypatch, capsys, "check", "pp0")
    assert ended == 2
    assert "nearest:  ppo" in printed
    assert "there is no algorithm file 'pp0'" in printed


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path, monkeypatch, capsys):
    path = tmp_path / "loud.py"
    path.write_text('raise ValueError("\\x1b[31mred")\n')
    _, printed = command(monkeypatch, capsys, "check", path)
    assert "\x1b" not in printed
    assert "\\x1b[31mred" in printed


def test_the_file_that_new_writes_passes(tmp_path):
    write_new(tmp_path / "mine.py")
    assert check(load_flow(str(tmp_path / "mine.py"))).problems == ()


# -- what is loaded --------------------------------------------------------------------------------------------------------------

LOADED = """
import sys
{before}
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "ray", "transformers", "datasets", "vllm"}}))
"""
CHECKED = """
from rlflow.cli.check import check_file
check_file({path!r}, [])
"""


def loaded(before):
    done = subprocess.run([sys.executable, "-c", LOADED.format(before=before)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_importing_rlflow_loads_no_torch():
    assert loaded("import rlflow") == "[]"


def test_help_loads_no_torch():
    assert loaded("import rlflow.cli.main\nsys.argv = ['rlflow', '--help']\ntry: rlflow.cli.main.main()\nexcept SystemExit: pass") == "[]"


@pytest.mark.slow
def test_checking_a_file_loads_torch_alone_and_a_file_that_is_refused_not_even_that():
    assert loaded(CHECKED.format(path=str(FIXTURES / "never_read.py"))) == "['torch']"
    assert loaded(CHECKED.format(path=str(FIXTURES / "column_missing.py"))) == "[]"
    assert loaded(CHECKED.format(path=str(FIXTURES / "symbol_torch.py"))) == "['torch']"
