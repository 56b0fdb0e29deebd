"""Planted canaries: none comes through."""

import json

import pytest

from rlflow.watch.secrets import masked, redacted, telling

CANARY = "canary-5f3a"


@pytest.mark.parametrize("name", [
    "token", "HF_TOKEN", "hfToken", "api-key", "apiKey", "APIKey", "wandb_api_key", "apikey", "db.password", "SECRET", "client_secret",
    "sshKey", "passwd", "aws.secret.access", "OPENAI_API_KEY", "Token2", "passphrase",
])  # fmt: skip
def test_a_telling_name_hides_its_value(name):
    assert redacted({name: CANARY}) == {name: "***"}
    assert redacted({"roles": {"actor": [{name: CANARY}]}}) == {"roles": {"actor": [{name: "***"}]}}
    assert redacted({name: {"inner": CANARY}}) == {name: "***"}
    assert redacted({name: 12345678}) == {name: "***"}


@pytest.mark.parametrize("name", ["max_tokens", "prompt_tokens", "tokens_per_second", "tokenizer", "monkey", "keyboard", "keep", "passes",
                                  "secretary", "TOKENIZERS_PARALLELISM", "hockey"])  # fmt: skip
def test_other_names_hide_nothing(name):
    assert not telling(name)
    assert redacted({name: "value"}) == {name: "value"}


def test_settings_that_only_sound_alike_stay():
    kept = {"key_dim": 64, "token_weight": 0.5, "per_token": True, "password": None, "secret": ""}
    assert redacted(kept) == kept


def test_values_of_the_environment_are_masked_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", CANARY)
    monkeypatch.setenv("LONGER_TOKEN", f"{CANARY}-and-more")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    monkeypatch.setenv("SOME_PATH", "/usr/share")
    monkeypatch.setenv("PIN_PASSWORD", "87654321")
    settings = {"model": f"https://x/{CANARY}?a", "list": [f"--k={CANARY}-and-more", ("t", CANARY)], CANARY: 1, "n": 87654321,
                "abc": "/usr/share/abc", "set": {CANARY}}  # fmt: skip
    text = json.dumps(redacted(settings))
    assert CANARY not in text
    assert "87654321" not in text
    assert "and-more" not in text
    assert "/usr/share/abc" in text
    assert masked(f"error: {CANARY}-and-more is wrong") == "error: *** is wrong"


def test_passwords_in_addresses_are_masked():
    assert masked("to https://user:pass%20word@host/x and http://host:80/") == "to https://user:***@host/x and http://host:80/"


def test_the_mapping_itself_is_left_alone():
    given = {"a": {"token": CANARY}}
    redacted(given)
    assert given == {"a": {"token": CANARY}}
