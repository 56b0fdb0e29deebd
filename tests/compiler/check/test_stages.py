"""`check` calls stages on synthetic rows before the run loads a model. It reports an error at the call's line
unless other values could avoid it.
"""

import threading
from pathlib import Path

import pytest
import torch

from rlflow import ALL, RANK0, flow, loss, repeat, row, scalar, stage, text, token
from rlflow.compiler.check.checker import check

CALLED = []


@loss
def policy_loss(new, logprobs, advantages):
    return -(new.logprobs - logprobs).exp() * advantages, {}


def found(tried, *names, **options):
    """Return the findings for a stage that gives `advantages`, and also the columns in ``names``."""

    @flow
    def trying(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= actor.logprobs(batch)
        batch |= tried(batch)
        actor.update(batch, policy_loss)

    problems = check(trying, with_variants=False).problems
    return [
        (one.severity, one.message, one.found)
        for one in problems
        if one.code in ("stage-raised", "stage-result")
    ]


def raising(error):
    @stage(gives="advantages")
    def raises(scores, mask):
        return error(scores, mask)

    return raises


def refuse(scores, mask):
    raise RuntimeError("such scores are not meant")


@pytest.mark.parametrize(
    ("error", "severity", "named"),
    [
        (lambda scores, mask: missing * mask, "error", "NameError: name 'missing' is not defined"),  # noqa: F821
        (
            lambda scores, mask: scores * mask,
            "error",
            "RuntimeError: The size of tensor a (4) must match the size of tensor b (5)",
        ),
        (lambda scores, mask: scores.typo, "error", "AttributeError: "),
        (lambda scores, mask: {}[float(scores[0])], "warning", "KeyError: "),
        (lambda scores, mask: Path("no such file").read_text(), "warning", "FileNotFoundError: "),
        (refuse, "note", "RuntimeError: such scores are not meant"),
    ],
)
def test_a_stage_exception_is_an_error_unless_values_may_cause_it(error, severity, named):
    [(level, message, what)] = found(raising(error))
    assert (level, message.startswith("stage 'raises' raises "), what.startswith(named)) == (
        severity,
        True,
        True,
    )
    assert "test_stages.py:" in what


@pytest.mark.parametrize(
    ("gives", "result", "named"),
    [
        ("advantages", lambda scores, mask: scores, "shape [4] for 4 rows of 5 tokens"),
        ("advantages", lambda scores, mask: mask.long(), "int64"),
        ("advantages", lambda scores, mask: None, "None"),
        ("advantages", lambda scores, mask: (mask.float(), mask.float()), "2 results"),
        (
            {"advantages": token(torch.float32), "kept": row(bool)},
            lambda scores, mask: (mask.float(), scores > mask.any()[None]),
            "shape [1]",
        ),
        (
            {"advantages": token(torch.float32), "said": text},
            lambda scores, mask: (mask.float(), "one"),
            "str",
        ),
    ],
)
def test_results_of_another_kind_than_declared_are_errors(gives, result, named):
    @stage(gives=gives)
    def misfits(scores, mask):
        values = result(scores, mask)
        return (*values[:1], values[1][:1]) if named == "shape [1]" else values

    [(level, message, what)] = found(misfits)
    assert (level, message.partition("'misfits' ")[1], what.startswith(named)) == (
        "error",
        "'misfits' ",
        True,
    )


def test_sound_stages_have_no_findings():
    @stage(gives={"advantages": token(torch.float32), "said": text}, rows="group")
    def whole(scores, group, mask, completion, ref_logprobs=None, *, generator, scale=2.0):
        print("a stage that prints")
        noise = torch.stack([torch.rand((), generator=one) for one in generator])
        return (
            (scores + noise)[:, None] * mask * scale,
            [words.upper() for words in completion],
            {"noise": noise},
        )

    @stage(gives={"total": scalar(torch.float32)}, dispatch=RANK0)
    def summed(scores):
        return scores.sum()

    @stage(gives={"seen": scalar(torch.float32)}, dispatch=ALL)
    def ranks(total):
        return total + 1

    @stage(gives="advantages")
    def read(advantages, mask, seen, *, total):
        assert (isinstance(seen, tuple), total) == (True, 0.5)
        return advantages * mask

    @flow
    def sound(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= actor.logprobs(batch)
        batch |= whole(batch)
        batch |= summed(batch)
        batch |= ranks(batch)
        actor.update(batch | read(batch, total=batch["total"]), policy_loss)

    problems = check(sound, with_variants=False).problems
    assert [problem for problem in problems if problem.code in ("stage-raised", "stage-result")] == []


def test_a_stage_that_does_not_return_is_skipped_after_its_timeout():
    opened = threading.Event()

    @stage(gives="advantages", timeout=0.05)
    def waits(scores, mask):
        opened.wait()
        return mask.float()

    assert found(waits) == []
    opened.set()


def test_stages_in_a_repeat_are_called_except_those_with_side_effects(capsys):
    @stage(gives="keep", rows="group")
    def kept(scores, group):
        print("not shown")
        CALLED.append("kept")
        return scores + unknown > 0  # noqa: F821

    @stage(pure=False)
    def noted(scores):
        CALLED.append("noted")

    @flow
    def repeating(prompts, actor, reward):
        def body(prompts):
            rows = actor.generate(prompts, samples=2, max_tokens=4)
            rows |= reward(rows)
            return rows | kept(rows)

        batch = repeat(body, prompts, groups=2, tries=2)
        noted(batch)
        batch |= actor.logprobs(batch)
        actor.update(batch.rename(sampled_logprobs="advantages"), policy_loss)

    report = check(repeating, with_variants=False)
    assert [problem.code for problem in report.errors] == ["stage-raised"]
    assert CALLED == ["kept"]
    assert capsys.readouterr().out == ""


def test_stages_and_losses_are_also_called_without_columns_that_are_not_due():
    @stage(gives="advantages")
    def adds(scores, mask, ref_logprobs=None):
        return scores[:, None] * mask + ref_logprobs

    @loss
    def scales(new, advantages, ref_logprobs=None):
        return -new.logprobs * advantages * ref_logprobs, {}

    @flow
    def rarely(prompts, actor, reference, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= reference.logprobs(batch, gives="ref_logprobs", every=2)
        batch |= adds(batch)
        actor.update(batch, scales)

    problems = check(rarely, with_variants=False).problems
    assert ["NoneType" in one.found for one in problems] == [True, True]
    assert ["adds" in one.message or "scales" in one.message for one in problems] == [True, True]
    assert {one.severity for one in problems} == {"error"}
