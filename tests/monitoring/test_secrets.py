"""Planted secrets are masked in every form."""

import io
import json
import traceback
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.monitoring import secrets
from rlflow.monitoring.secrets import MASK, MaskedLines, guard, masked, redacted, remember, telling

SECRET = "canary-5f3a"


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "HF_TOKEN",
        "hfToken",
        "api-key",
        "apiKey",
        "APIKey",
        "wandb_api_key",
        "apikey",
        "db.password",
        "SECRET",
        "client_secret",
        "sshKey",
        "passwd",
        "aws.secret.access",
        "OPENAI_API_KEY",
        "Token2",
        "passphrase",
        "GITHUB_PAT",
        "DB_PASS",
        "AWS_AUTH",
        "MYSQL_PWD",
        "pat",
        "dbPass",
        "http.auth",
        "Authorization",
        "bearer",
        "PGPASSWORD",
        "authtoken",
        "client.credentials",
        "session-cookie",
    ],
)
def test_a_secret_name_hides_its_value(name):
    assert redacted({name: SECRET}) == {name: "***"}
    assert redacted({"roles": {"actor": [{name: SECRET}]}}) == {"roles": {"actor": [{name: "***"}]}}
    assert redacted({name: {"inner": SECRET}}) == {name: "***"}
    assert redacted({name: 12345678}) == {name: "***"}


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "prompt_tokens",
        "stop_token_ids",
        "tokens_per_second",
        "tokenizer",
        "monkey",
        "keyboard",
        "keep",
        "passes",
        "secretary",
        "TOKENIZERS_PARALLELISM",
        "hockey",
        "path",
        "PATH",
        "PYTHONPATH",
        "author",
        "authored",
        "compass",
        "bypass",
        "pattern",
        "patience",
        "forbearer",
        "RAY_AUTH_MODE",
        "SSH_AUTH_SOCK",
        "RAY_AUTH_TOKEN_PATH",
        "API_KEY_FILE",
        "max_new_tokens",
        "keyword",
    ],
)
def test_other_names_hide_nothing(name):
    assert not telling(name)
    assert redacted({name: "value"}) == {name: "value"}


def test_settings_with_similar_names_stay():
    kept = {
        "key_dim": 64,
        "token_weight": 0.5,
        "per_token": True,
        "password": None,
        "secret": "",
        "pass_rate": "0.5",
        "key_size": "64",
        "pass_k": "1e-3",
        "auth": "true",
    }
    assert redacted(kept) == kept


def test_values_of_the_environment_are_masked_everywhere(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("LONGER_TOKEN", f"{SECRET}-and-more")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    monkeypatch.setenv("SOME_PATH", "/usr/share")
    monkeypatch.setenv("PIN_PASSWORD", "87654321")
    settings = {
        "model": f"https://x/{SECRET}?a",
        "list": [f"--k={SECRET}-and-more", ("t", SECRET)],
        SECRET: 1,
        "n": 87654321,
        "abc": "/usr/share/abc",
        "set": {SECRET},
    }
    text = json.dumps(redacted(settings))
    assert SECRET not in text
    assert "87654321" not in text
    assert "and-more" not in text
    assert "/usr/share/abc" in text
    assert masked(f"error: {SECRET}-and-more is wrong") == "error: *** is wrong"


def test_passwords_in_addresses_are_masked():
    assert (
        masked("to https://user:pass%20word@host/x and http://host:80/")
        == "to https://user:***@host/x and http://host:80/"
    )


def test_the_input_mapping_does_not_change():
    given = {"a": {"token": SECRET}}
    redacted(given)
    assert given == {"a": {"token": SECRET}}


KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj\n" * 3
SHAPED = {
    "OpenAI": "sk-proj-Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4z",
    "Stripe": "sk_live_51H8abcdefghijklmnop",
    "GitHub": "ghp_" + "a1B2" * 9,
    "GitHub, new": "github_pat_11ABCDEFG0" + "aB3d" * 12,
    "GitLab": "glpat-abcdefghij0123456789",
    "Hugging Face": "hf_" + "AbCdEfGhIj" * 3 + "KlMn",
    "AWS": "AKIAIOSFODNN7EXAMPLE",
    "Slack": "xoxb-123456789012-abcdefGHIJ",
    "Google": "AIza" + "SyD-9tSrke72P" * 2 + "abcdefghi",
    "npm": "npm_" + "abcdEF" * 6,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "PEM": f"-----BEGIN RSA PRIVATE KEY-----\n{KEY}-----END RSA PRIVATE KEY-----",
    "PEM, escaped": json.dumps(f"-----BEGIN PRIVATE KEY-----\n{KEY}-----END PRIVATE KEY-----")[1:-1],
}


@pytest.mark.parametrize("secret", SHAPED.values(), ids=SHAPED)
def test_a_secret_is_recognised_by_its_form(secret):
    for before, after in (
        ("", ""),
        ("failed: ", " is wrong"),
        ("'", "'"),
        ("x=", "&y"),
        ("https://h/", "?a=b"),
        ("MY_", ""),
    ):
        assert masked(f"{before}{secret}{after}") == f"{before}***{after}"
    assert redacted({"note": [secret]}) == {"note": ["***"]}


def test_a_truncated_key_is_masked():
    assert masked(f"-----BEGIN PRIVATE KEY-----\n{KEY}MIIEvQIBADANBgkqhkiG9w0 and more") == "*** and more"


BESIDE = [
    "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
    "wandb login 0123456789abcdef0123456789abcdef01234567",
    "wandb: key 0123456789abcdef0123456789abcdef01234567",
    "Settings(api_key='ab c!@#defgh')",
    '{"api_key": "abc!@#defgh"}',
    "https://host/x?access_token=abcdefgh1&y=1",
    "--redis-password=abcdefgh1",
    "--api-key abcdefgh1",
    "password: abcdefgh1",
    "db.password = abcdefgh1",
    "-Dpassword=abcdefgh1",
    "Authorization: Bearer abcdefgh1",
    "bearer abcdefghijklmnopqrstuvwx",
    "'Authorization': 'Basic YWxhZGRpbjpvcGVu'",
    "https://user:a%20b@host/",
    "https://user:pa@ss@host/",
    "redis://:abcdefgh1@host:1/0",
    "https://abcdefghijklmnopqrst@github.com/x",
    "https://host/x?sv=2020&sig=abcdefghABCDEFGH%2F1234&se=2020",
]
HIDDEN = ("0123456789abcdef", "abcdefgh", "defgh", "YWxh", "a%20b", "pa@ss", "ss@")


@pytest.mark.parametrize("text", BESIDE)
def test_a_secret_is_recognised_by_the_name_next_to_it(text):
    assert "***" in masked(text)
    assert not any(hidden in masked(text) for hidden in HIDDEN)


@pytest.mark.parametrize(
    "text",
    [
        "commit 0123456789abcdef0123456789abcdef01234567",
        "KeyError: 'answer_text'",
        "eos_token=<|im_end|> pad_token='<pad>'",
        "max_tokens=1048576",
        "per_token=0.123456789",
        "token: unexpected",
        "the key: 'question_text'",
        "task-aaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "http://host:8080/path",
        "risk-averse-and-more-words-of-it",
        "Bearer tokens are refused",
        "path=/usr/share/models/one",
        "basic understanding of things",
        "hf_model_folder",
        "actor.update/loss 0.123  reward/mean 0.5",
        "key_dim=12345678",
        "a@b.example",
        "Auth failed: permission denied",
        "stage 'generate' failed in iteration 3 on 64 rows",
        "--data.chat false for plain text",
        "data.answer=reward_model.ground_truth",
        'table(key="prompt_id", wins=0.0)',
    ],
)
def test_harmless_text_stays(text):
    assert masked(text) == text


def test_shell_folders_are_no_secrets(monkeypatch):
    monkeypatch.setenv("PWD", "/work/somewhere")
    monkeypatch.setenv("DB_PWD", SECRET)
    assert masked(f"/work/somewhere/{SECRET}") == "/work/somewhere/***"


@pytest.mark.parametrize(
    "value", ["p\"ss\\w'rd-91", "pässwörd-ü91", "two words 91", f"{KEY}end", "a/b?c=d&e"], ids=repr
)
def test_a_quoted_secret_is_recognised(monkeypatch, value):
    monkeypatch.setenv("SOME_SECRET", value)
    shown = [
        value,
        json.dumps({"a": value}),
        repr([value]),
        f"https://h/{urllib.parse.quote(value, safe='')}",
        *value.splitlines()[:3],
    ]
    for text in map(masked, shown):
        assert "***" in text
        assert not any(part in text for part in ("91", "rd", "MIIE", "c=d"))


def test_the_value_of_a_flag_is_masked_in_errors():
    remember(
        {
            "hp.api_key": "given-canary",
            "actor": {"pass": ["first-canary", "second-canary"]},
            "hp.key_dim": "64",
            "lr": "0.123456",
        }
    )
    remember(
        {
            "auth": "abc",
            "reward": ("file.py:function",),
            "hp.prompt_key": "question",
            "pad_token": "endoftext",
        }
    )
    remember({"pass_metric": "accuracy"})
    assert (
        masked("no given-canary in first-canary second-canary 64 0.123456 abc")
        == "no *** in *** *** 64 0.123456 abc"
    )
    assert (
        masked("question endoftext accuracy file.py:function")
        == "question endoftext accuracy file.py:function"
    )
    remember(
        {
            "api_key": "letters",
            "db_pass": "onlyletters",
            "hf_token": "wordlike",
            "pass": "plainword",
            "prompt_key": "q1w2e3r4",
        }
    )
    assert masked("letters onlyletters wordlike plainword q1w2e3r4") == "*** *** *** *** ***"


def test_a_guarded_stream_masks_its_output(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    stream = io.StringIO()
    guard(stream, None)
    guard(stream)
    print("the token", SECRET, file=stream)
    stream.writelines([f"{SECRET}\n"])
    try:
        raise ValueError(SECRET)
    except ValueError:
        traceback.print_exc(file=stream)
    assert stream.write("abc") == 3
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().startswith("the token ***\n***\nTraceback")
    assert stream.getvalue().endswith("ValueError: ***\nabc")


def test_only_the_lines_of_a_private_key_are_masked():
    mask = MaskedLines()
    lines = [
        "before",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "b3BlbnNzaC1rZXktdjEAAAAA",
        "x",
        "-----END OPENSSH PRIVATE KEY-----",
        "after",
    ]
    assert [mask(line) for line in lines] == ["before", MASK, MASK, MASK, MASK, "after"]
    assert [
        mask(line) for line in ("-----BEGIN RSA PRIVATE KEY----- abcd -----END RSA PRIVATE KEY-----", "after")
    ] == [MASK, "after"]
    mask("-----BEGIN PRIVATE KEY-----")  # a key that never ends
    assert [mask("text") for _ in range(300)][-1] == "text"


@given(st.text())
def test_masking_twice_equals_masking_once(text):
    assert masked(masked(text)) == masked(text)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text())))
def test_redacted_json_keeps_its_shape(mapping):
    found = redacted(mapping)
    json.dumps(found)
    assert len(found) == len({masked(name) for name in mapping})


@pytest.mark.parametrize(
    "part", ["a", "a-", "-eyJ", 'a="', "wandb ", "://a:", "-----BEGIN PRIVATE KEY-----", "key=", "token: "]
)
def test_masking_takes_linear_time(part):
    """A backtracking pattern would take hours for these texts."""
    assert masked(part * (10**5 // len(part))) is not None


def test_the_page_lists_the_secret_words():
    page = " ".join(Path("docs/security.md").read_text().split())
    listed = page.partition("a word of it is ")[2].partition(" or jwt,")[0]
    assert {*listed.split(", "), "jwt"} == secrets.TELLING
