"""Results of a stage become columns that every later step accepts."""

from rlflow import stage, text
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.execution.apply import apply_stage


@stage(gives={"question": text})
def asked(prompt):
    return [odd if place else "sound" for place, odd in enumerate(prompt)]


@stage(gives={"question": text})
def asked_as_messages(prompt):
    return [[{"role": "user", "content": each}] for each in prompt]


def applied(stage, *prompts):
    rows, tallies = apply_stage(
        stage, Batch(Axis.fresh(len(prompts)), Batch.of(prompt=list(prompts)).data), {}, 0
    )
    return rows["question"], {name: tally.total for name, tally in tallies.items()}


def test_characters_unfit_for_tokenizers_are_replaced_and_counted():
    assert applied(asked, "a", "b \ud83c c\0") == (["sound", "b \ufffd c\ufffd"], {"replaced": 2.0})
    assert applied(asked_as_messages, "\ud800") == (
        [[{"role": "user", "content": "\ufffd"}]],
        {"replaced": 1.0},
    )
    assert applied(asked, "a", "🎉") == (["sound", "🎉"], {})
