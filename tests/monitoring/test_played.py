"""`rlflow show` prints an episode turn by turn."""

import json

from rlflow.monitoring.tables import last_episode


def samples(folder, *rows):
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = last_episode(folder)
    return None if text is None else str(text).splitlines()


def test_the_last_episode_of_several_turns_is_shown(tmp_path):
    long = {
        "iteration": 3,
        "prompt": "1 + 1 =",
        "finish": "env",
        "scores": 1.0,
        "episode": {"reset": "go", "turns": [{"said": "3", "says": " no.\n"}, {"said": "2", "reward": 1.0}]},
    }
    short = {
        "iteration": 4,
        "prompt": "2 + 2 =",
        "finish": "env",
        "scores": 1.0,
        "episode": {"turns": [{"said": "4", "reward": 1.0}]},
    }
    assert samples(tmp_path, long, short) == [
        "an episode of iteration 3: 1 + 1 =",
        "  environment: go",
        "  model: 3",
        "  environment:  no.\\n",
        "  model: 2  (reward 1)",
        "  end: env, score 1",
    ]
    assert samples(tmp_path, short)[1:] == ["  model: 4  (reward 1)", "  end: env, score 1"]


def test_messages_and_failures_are_shown_and_long_text_is_cut(tmp_path):
    row = {
        "iteration": 0,
        "prompt": "q",
        "finish": "failed",
        "scores": None,
        "episode": {
            "turns": [{"said": "x" * 900, "says": [{"role": "tool", "content": "5"}]}],
            "failed": "timeout: no answer",
        },
    }
    shown = samples(tmp_path, row)
    assert shown[1] == "  model: " + "x" * 399 + "…"
    assert shown[2:] == ["  environment: [tool] 5", "  end: failed; timeout: no answer"]


def test_without_an_episode_nothing_is_shown(tmp_path):
    assert last_episode(tmp_path) is None
    assert samples(tmp_path, {"iteration": 0, "completion": "x"}) is None
    assert samples(tmp_path, {"iteration": 0, "episode": {"turns": 3}}) == [
        "an episode of iteration 0: None",
        "  end: None",
    ]
