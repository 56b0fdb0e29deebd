"""Names on the Hub, as text."""

from pathlib import Path

import pytest

from rlflow.data.hub_names import HubName, folder_name, hub_data, hub_model, local_instead, snapshot_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("model", "Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@main", HubName("model", "Qwen/Qwen3-0.6B", "main")),
        ("org/name@refs/pr/3", HubName("model", "org/name", "refs/pr/3")),
        (f"org/name@{COMMIT}", HubName("model", "org/name", COMMIT)),
        ("own", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/org/name", None),
        ("org/name/part", None),
        ("rewards/mine.py", None),
        ("http://host/name", None),
    ],
)
def test_a_model_is_owner_and_name_and_revision(text, name):
    assert hub_model(text) == name
    assert name is None or str(name) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("openai/gsm8k", HubName("dataset", "openai/gsm8k")),
        ("openai/gsm8k:main", HubName("dataset", "openai/gsm8k", None, "main")),
        ("openai/gsm8k/test", HubName("dataset", "openai/gsm8k", None, None, "test")),
        ("openai/gsm8k:main/test", HubName("dataset", "openai/gsm8k", None, "main", "test")),
        (f"org/d@{COMMIT}:main/test", HubName("dataset", "org/d", COMMIT, "main", "test")),
        ("org/d@refs/convert/parquet:main", HubName("dataset", "org/d", "refs/convert/parquet", "main")),
        ("gsm8k/train.jsonl", None),
        ("data/gsm8k/train.csv", None),
        ("chain_sum", None),
    ],
)
def test_data_have_a_config_and_a_split(text, name):
    assert hub_data(text) == name
    assert name is None or str(name) == text


def test_a_local_path_of_the_same_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_model("org/name") is not None
    assert not local_instead("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_model("org/name") is None
    assert hub_data("org/name") is None
    assert local_instead("org/name")
    assert hub_model("org/name@main") is not None, "a revision names the Hub"


def test_a_folder_of_the_cache_names_its_repository_and_commit():
    folder = Path(f"/home/me/hub/models--org--my--model/snapshots/{COMMIT}")
    assert snapshot_of(folder) == HubName("model", "org/my--model", COMMIT)
    assert (folder_name(folder), folder_name(Path("models/own"))) == ("my--model", "own")
    assert snapshot_of(Path("models/own")) is None
