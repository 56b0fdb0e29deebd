"""Names of measured values in metrics.jsonl."""

import pytest

from rlflow.author.figures import HELD_OUT, SCORE, SECONDS, SPEED, Figure, Of


@pytest.mark.parametrize(
    ("figure", "key"),
    [
        (Figure(Of.STAGE, "spread", "compare"), "compare/spread"),
        (Figure(Of.NODE, "kept", "repeat.body"), "repeat.body/kept"),
        (Figure(Of.UPDATE, "steps", "actor.update#2", "actor"), "actor.update#2/steps"),
        (Figure(Of.REWARD, "mean", "judge", "judge"), "judge/mean"),
        (Figure(Of.REWARD, "mean", "judge", "judge", "math"), "judge/math_mean"),
        (Figure(Of.LOGGED, "depth", "judge", "judge", "math"), "judge/math_depth"),
        (Figure(Of.LOGGED, "tries"), "env/tries"),
        (Figure(Of.MISSING, "none", "judge", "judge", "math"), "judge/missing_math/none"),
        (Figure(Of.MISSING, "raised", "judge", "judge"), "judge/missing_env_raised"),
        (Figure(Of.SCORES, "flat_groups"), "reward/flat_groups"),
        (Figure(Of.SCORES, "lowest", role="actor"), "actor/reward/lowest"),
        (Figure(Of.SCORES, "lowest", part="judge"), "judge/lowest"),
        (Figure(Of.ROWS, "policy/entropy"), "policy/entropy"),
        (Figure(Of.ROWS, "policy/entropy", role="actor"), "actor/policy/entropy"),
        (Figure(Of.SOURCE, "gsm8k"), "scores/gsm8k"),
        (Figure(Of.WEIGHT_CHECK, "max", role="actor"), "canary/actor_max"),
        (Figure(Of.ROW_OUTCOME, "left out"), "fates/left_out"),
        (Figure(Of.LEFT_OUT, "empty"), "data/left_out_empty"),
        (Figure(Of.STATE, "beta"), "beta"),
        (SECONDS, "seconds"),
        (SPEED, "response/tokens_per_second"),
        (HELD_OUT, "evaluation/sampled"),
        (SCORE, "evaluation/score"),
        (Figure(Of.EVALUATION, "sampled", part="gsm8k"), "evaluation/sampled/gsm8k"),
        (Figure(Of.EVALUATION, "greedy", role="solver", part="gsm8k"), "evaluation/solver/greedy/gsm8k"),
        (Figure(Of.SET, "pass@4", part="hard"), "evaluation/hard/pass@4"),
        (Figure(Of.SET, "sampled", role="solver", part="hard"), "evaluation/hard/solver/sampled"),
    ],
)
def test_a_figure_has_a_plain_name(figure, key):
    assert figure.key == key
