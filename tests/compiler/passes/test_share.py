"""What a plan says is computed once."""

import rlflow.data.tasks

MODEL = f"{next(iter(rlflow.data.tasks.__path__))}/arithmetic_model"
GRPO = f"grpo --model {MODEL} --prompts 4 --hp.samples 8 --hp.max_tokens 50 --data.max_prompt 100"


def said(explanation):
    return next(note.what for note in explanation.notes if note.name == "share")


def test_rows_of_a_prompt_compute_it_once_in_forwards_and_updates(planned_as):
    found = planned_as(GRPO)
    names = ["actor.logprobs", "actor.update"]
    assert said(found) == "; ".join(f"{name} computes a prompt once for 8 rows" for name in names)
    assert found.as_json()["packed"] == [
        {"node": name, "tokens": 32 * 150, "computed": 4 * 100 + 32 * 50} for name in names
    ]


def test_not_by_a_trainer_that_is_told_otherwise_or_cannot(planned_as):
    for words in (f"{GRPO} --actor.packed false", "grpo --prompts 4"):
        found = planned_as(words)
        assert said(found) == "no trainer has rows that share prompts"
        assert found.as_json()["packed"] == []


def test_each_role_for_itself_and_chosen_and_rejected_answers_too(planned_as):
    of_roles = said(planned_as(f"ppo --model {MODEL} --hp.samples 2 --critic.packed false"))
    assert "critic" not in of_roles
    assert "actor.update computes a prompt once for 2 rows" in of_roles
    assert "for 2 rows" in said(planned_as(f"dpo --model {MODEL}"))


def test_one_row_of_a_prompt_has_nothing_to_share(planned_as):
    assert planned_as(f"sft --model {MODEL}").packed == ()
