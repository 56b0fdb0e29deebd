"""Where the weights of ``--prompts-by`` come from, and the mistakes in naming them."""

import pytest
import torch

from rlflow import RANK0, flow, loss, row, stage, table
from rlflow.author.source_lines import definition_place
from rlflow.compiler.check.checker import check
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.trace.compile import TraceOptions, compile_flow, trace


@loss
def likelihood(new, scores, policy_version):
    return -new.logprobs * scores[:, None], {}


@stage(gives={"wins": row(torch.float32), "tries": row(torch.float32)})
def outcomes(scores):
    return scores, torch.ones_like(scores)


@stage(gives={"gain": row(torch.float32)})
def gain(wins, tries, *, power=1.0):
    return wins / tries.clamp(min=1) ** power


@stage(gives={"gain": row(torch.float32)})
def of_prompts(wins, prompt_tokens):
    return wins


@stage(gives={"gain": row(torch.float32)})
def over_time(wins, progress):
    return wins * progress


@stage(gives={"gain": row(torch.float32)}, dispatch=RANK0)
def of_all(wins):
    return wins / wins.sum()


@stage(gives={"gain": row(torch.float32)}, rows="group")
def of_groups(wins):
    return wins


@stage(gives={"gain": row(torch.float32)}, pure=False)
def impure(wins):
    return wins


@stage(gives={"gain": row(torch.float32)})
def by_luck(wins, *, generator):
    return wins


@stage(gives="gain")
def unknown(wins):
    return wins


def weighed(weigh, key="prompt_id", stale_ok=None, more=lambda prompts: prompts):
    """Return a flow that computes weights of its prompts from a table."""

    @flow(keeps=lambda hp: {"seen": table(key=key, wins=0.0, tries=0.0), "other": table(hits=0.0)})
    def remembering(prompts, actor, reward, seen, other):
        prompts = more(prompts)
        prompts |= weigh(prompts | seen.read(prompts, stale_ok=stale_ok))
        batch = actor.generate(prompts | other.read(prompts), samples=2, max_tokens=4)
        batch |= reward(batch)
        seen.write(batch | outcomes(batch), wins="add", tries="add")
        other.write((batch | outcomes(batch)).rename(wins="hits"), hits="add")
        actor.update(batch, likelihood)

    return remembering


def problems(made, written):
    return [
        problem
        for problem in trace(made, None, TraceOptions(prompts_by=written)).problems
        if problem.code.startswith("prompts-by")
    ]


def test_weights_come_from_a_column_or_from_a_stage():
    by = compile_flow(weighed(gain), None, TraceOptions(prompts_by="seen.tries")).drawn_by
    assert (by.table, by.column, by.stage, str(by)) == ("seen", "tries", None, "seen.tries")
    by = compile_flow(weighed(gain), None, TraceOptions(prompts_by="seen.gain")).drawn_by
    assert (by.stage.name, dict(by.columns)) == ("gain", {"wins": "wins", "tries": "tries"})
    assert [read.memory for read in by.reads] == ["seen"]
    renamed = weighed(lambda prompts: gain(prompts.rename(tries="wins", wins="tries"), gives="worth"))
    by = compile_flow(renamed, None, TraceOptions(prompts_by="seen.worth")).drawn_by
    assert (by.column, dict(by.columns)) == ("gain", {"wins": "tries", "tries": "wins"})
    assert compile_flow(weighed(unknown), None, TraceOptions(prompts_by="seen.gain")).drawn_by.stage
    assert compile_flow(weighed(gain)).drawn_by is None


UNFIT = {
    of_prompts: "'of_prompts' also reads prompt_tokens",
    over_time: "'over_time' also reads progress",
    of_all: "'of_all' needs several rows: dispatch=RANK0",
    of_groups: "'of_groups' needs several rows",
    impure: "'impure' has side effects",
    by_luck: "'by_luck' draws random numbers",
}


@pytest.mark.parametrize("weigh", UNFIT, ids=lambda weigh: weigh.name)
def test_a_stage_that_cannot_weigh_other_records_is_refused_at_its_line(weigh):
    (problem,) = problems(weighed(weigh), "seen.gain")
    assert problem.code == "prompts-by-stage"
    assert UNFIT[weigh] in problem.found
    assert problem.place.path == __file__
    assert problem.place.line >= definition_place(weighed).line
    assert "seen.wins" in problem.remedy


def test_weights_from_several_calls_are_refused():
    @flow(keeps=lambda hp: {"seen": table(wins=0.0, tries=0.0)})
    def remembering(prompts, actor, reward, seen):
        wins = seen.read(prompts).select("wins")
        prompts |= gain(wins | seen.read(prompts).select("tries"))
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        seen.write(batch | outcomes(batch), wins="add", tries="add")
        actor.update(batch, likelihood)

    (problem,) = problems(remembering, "seen.gain")
    assert problem.found == "'gain' reads columns of 2 calls of seen.read"


@pytest.mark.parametrize(
    ("written", "code", "nearest"),
    [
        ("sen.gain", "prompts-by-table", "seen"),
        ("seen", "prompts-by-table", "seen"),
        ("gain", "prompts-by-table", None),
        ("seen.gian", "prompts-by-column", "seen.gain"),
        ("seen.hits", "prompts-by-column", None),
        ("other.gain", "prompts-by-stage", None),
    ],
)
def test_a_name_that_is_no_weight_is_refused(written, code, nearest):
    (problem,) = problems(weighed(gain), written)
    assert (problem.code, problem.nearest, problem.setting) == (code, nearest, "prompts_by")
    assert problem.remedy


def test_a_table_by_another_key_is_refused():
    @stage(gives={"bucket": row(torch.int64)})
    def bucket(prompt_id):
        return prompt_id % 3

    made = weighed(gain, "bucket", more=lambda prompts: prompts | bucket(prompts))
    (problem,) = problems(made, "seen.gain")
    assert (problem.code, problem.found) == ("prompts-by-key", "a table by bucket")


def test_weights_count_as_read():
    def unread(written):
        found = trace(weighed(gain), None, TraceOptions(prompts_by=written)).problems
        return [each.remedy for each in found if each.code == "never-read" and each.found == "gain"]

    assert unread(None) == ["remove it, or read it, or draw prompts by it: --prompts-by seen.gain"]
    assert unread("seen.tries") == unread(None)
    assert unread("seen.gain") == []

    @flow(keeps=lambda hp: {"seen": table(tries=0.0)})
    def counting(prompts, actor, reward, seen):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        seen.write(batch | outcomes(batch), tries="add")
        actor.update(batch, likelihood)

    for written in (None, "seen.tries"):
        found = trace(counting, None, TraceOptions(prompts_by=written)).problems
        assert ("keeps-unused" in {problem.code for problem in found}) == (written is None)
    program = compile_flow(counting, None, TraceOptions(prompts_by="seen.tries"))
    assert "no seen.read" in next(stale_problems(program, 1)).found


@pytest.mark.parametrize("written", ["seen.gain", "seen.tries"])
def test_iterations_ahead_need_a_reason_to_draw_by_old_numbers(written):
    def draws(stale_ok):
        options = TraceOptions(prompts_by=written)
        report = check(weighed(gain, stale_ok=stale_ok), None, options, staleness=1, with_variants=False)
        return [problem for problem in report.problems if problem.code == "staleness-draw"]

    (problem,) = draws(None)
    assert "seen.read(prompts, stale_ok=" in problem.remedy
    assert problem.place.path == __file__
    assert draws("wins change slowly") == []
