"""Keep secrets out of settings, logs, trackers and terminals.

A secret is recognised by its name (in settings, flags and the environment), by its value once that was seen
under such a name, or by its shape. Text from models and data (samples.jsonl, answers.jsonl) is never changed.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TextIO

MASK = "***"
# parts of the names of secrets; without 'tokens', which rlflow uses for counts: max_tokens, prompt_tokens
TELLING = {
    "token",
    "secret",
    "secrets",
    "key",
    "keys",
    "apikey",
    "apikeys",
    "password",
    "passwords",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
    "creds",
    "pat",
    "pass",
    "auth",
    "authorization",
    "pwd",
    "bearer",
    "cookie",
    "jwt",
}
# endings of such parts, as in PGPASSWORD and authtoken
ENDINGS = ("password", "passwd", "passphrase", "secret", "token", "apikey")
# as the last part of a name, these mean that the value is not itself a secret, as in token_path or token_ids
ABOUT = {"mode", "method", "type", "sock", "path", "file", "dir", "url", "ids"}
# parts that, even alone, name a secret in running text
ALONE = {"password", "passwd", "passphrase", "secret", "apikey", "pwd"}
# before 'key', these mean that the key is a secret and not a field's name
KEYS = {"api", "access", "secret", "private", "ssh", "auth", "client", "license"}
TOKENS = {
    "eos",
    "bos",
    "pad",
    "unk",
    "sep",
    "cls",
    "mask",
    "stop",
    "start",
    "end",
    "image",
    "audio",
    "video",
    "special",
    "think",
}
WORD = re.compile(r"[A-Za-z][A-Za-z_. -]{0,18}")
FOLDERS = ("PWD", "OLDPWD")  # variables that every shell sets
SHORTEST = 6  # a shorter value would also occur in harmless text
LINE = 16  # least characters of a line in a multi-line secret for the line to be masked alone
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
# scheme://user:password@host, or a token alone before the host
ADDRESS = re.compile(r"""(://[^/\s:@"']*:)[^/\s"']+@|(://)[\w-]{20,}@""")
SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-[\w-]{20,}|[sr]k_(?:live|test)_\w{16,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|hf_\w{30,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|AIza[\w-]{35}|npm_\w{36}|pypi-[\w-]{50,}"
    r"|ya29\.[\w-]{20,}|(?<!-)eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|(?<=[?&]sig=)[\w%+/=-]{16,}"  # the signature of a signed URL
    r"|-----BEGIN [A-Z0-9 ]{0,20}PRIVATE KEY-----"
    r"(?:(?:(?!-----BEGIN)[\s\S])*?-----END [A-Z0-9 ]{0,20}PRIVATE "
    r"KEY-----|(?:(?:\\[nr]|\s)*[A-Za-z0-9+/=]{16,})*)"
)
BEARER = re.compile(r"\b(bearer\s{1,3})(?=\S*\d|\S{20})[\w.~+/=-]{8,}", re.IGNORECASE)
BASIC = re.compile(r"(authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?basic\s{1,3})[\w+/=-]{4,}", re.IGNORECASE)
# without such a context, 40 hexadecimal digits are a git commit
WANDB = re.compile(r"(wandb\W{0,3}(?:\w{1,40}\W{1,3}){0,4}?)\b[0-9a-f]{40}\b", re.IGNORECASE)
NAMED_VALUE = re.compile(  # api_key=VALUE, "api_key": "VALUE", --api-key VALUE
    r"""(?P<lead>(?<![\w.])(?P<flag>--)?(?P<name>[A-Za-z][\w.-]{0,80})(?:(?P<sign>["']?\s{0,3}[=:]\s{0,3})|(?(flag)\s{1,3}|(?!))))"""
    r"""(?:(?P<quote>["'])(?P<quoted>[^"'<\[{][^"']{5,4096})(?P=quote)|(?=(?P<plain>[^\s"'<>\[\]{}()|,;&]{8})))"""
)
KEY_BEGIN, KEY_END = (
    re.compile(rf"-----{word} [A-Z0-9 ]{{0,20}}PRIVATE KEY-----") for word in ("BEGIN", "END")
)
KEY_LINES = 200  # maximum number of lines in a private key
PLAIN = re.compile(r"""[^\s"'<>\[\]{}()|,;&]*""")
_remembered: set[str] = set()


@lru_cache(maxsize=4096)
def telling(name: str) -> bool:
    """Whether a setting's name sounds like that of a secret.

    The name can be in snake_case, kebab-case, dotted.name or camelCase.
    """
    parts = [part.lower() for part in PARTS.findall(name)]
    return any(part in TELLING or part.endswith(ENDINGS) for part in parts) and parts[-1] not in ABOUT


def redacted(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested mapping with secrets masked.

    Short numbers, booleans and None are kept, because settings such as --hp.key_dim aren't secrets.
    """
    return _redacted(mapping, _values())


def _redacted(mapping: Mapping[str, Any], values: Sequence[str]) -> dict[str, Any]:
    return {
        _masked(str(key), values): MASK if telling(str(key)) and hides(value) else _cleaned(value, values)
        for key, value in mapping.items()
    }


def remember(mapping: Mapping[str, Any]) -> None:
    """Remember the secrets in a mapping, so that ``masked`` hides them wherever they appear."""
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            remember(value)
        elif telling(str(name)) and hides(value):
            _remembered.update(
                text for text in _texts(value) if len(text) >= SHORTEST and not _ordinary(str(name), text)
            )


def masked(text: str) -> str:
    """Return the text with secrets masked.

    These are the values of secret environment variables, remembered values, strings that look like a secret,
    passwords in URLs, and values that follow a secret's name.
    """
    return _masked(text, _values())


def _masked(text: str, values: Sequence[str]) -> str:
    for value in values:
        text = text.replace(value, MASK)
    text = ADDRESS.sub(lambda match: f"{match[1] or match[2]}{MASK}@", SHAPES.sub(MASK, text))
    for shape in (BEARER, BASIC, WANDB):
        text = shape.sub(rf"\1{MASK}", text)
    return _mask_named_values(text)


class MaskedLines:
    """Masks secrets in text that arrives line by line, including private keys of several lines."""

    def __init__(self) -> None:
        self._within = 0  # how many more lines of a private key may follow; 0 outside a key

    def __call__(self, line: str) -> str:
        """Return a line with secrets masked. Pass it without its newline."""
        if self._within:
            self._within = 0 if KEY_END.search(line) else self._within - 1
            return MASK
        starts = [match.end() for match in KEY_BEGIN.finditer(line)]
        self._within = KEY_LINES if starts and not KEY_END.search(line, starts[-1]) else 0
        return masked(line)


def guard(*streams: TextIO | None) -> None:
    """From now on, mask secrets in everything written to these streams.

    This covers what stages print, warnings and tracebacks.
    """
    for stream in streams:
        if stream is not None and not hasattr(stream, "guarded"):
            _guard(stream)


def _guard(stream: Any) -> None:
    plain = stream.write

    def write(text: str) -> int:
        plain(masked(text) if text.strip() else text)
        return len(text)

    stream.write, stream.guarded = write, True


def _mask_named_values(text: str) -> str:
    """Mask values in running text that follow a secret's name."""
    pieces, at = [], 0
    while match := NAMED_VALUE.search(text, at):
        end, quote = match.end("lead"), match["quote"] or ""
        pieces.append(text[at:end])
        at = end  # after a harmless name, continue there, since the name of a secret may follow
        if _announces(match):
            value = match["quoted"] or PLAIN.match(text, end)[0]  # type: ignore[index]
            if not NUMBER.fullmatch(value) and MASK not in value and not _column(match["name"], value):
                pieces.append(f"{quote}{MASK}{quote}")
                at = end + len(value) + 2 * len(quote)
    return "".join([*pieces, text[at:]])


def _column(name: str, value: str) -> bool:
    """Whether the text names a key of rows, as in table(key="prompt_id") and key=prompts.prompt_id."""
    return name == "key" and WORD.fullmatch(value) is not None and value.islower()


def _announces(match: re.Match[str]) -> bool:
    """Whether a name in running text is clearly that of a secret.

    Its last part must be telling, which rules out KeyError. Before a colon, the name must also have several
    parts or an unambiguous last part, because "unexpected token: x" is harmless.
    """
    parts = PARTS.findall(match["name"].rpartition(".")[2])
    last = parts[-1].lower() if parts else ""
    tells = last in TELLING or last.endswith(ENDINGS)
    return tells and ("=" in (match["sign"] or "=") or len(parts) > 1 or last in ALONE)


def _values() -> list[str]:
    """Return the values to mask, longest first.

    If a short value were masked first, the rest of a longer one could stay visible.
    """
    telling_values = {
        value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST and name not in FOLDERS and telling(name)
    }
    return sorted(
        {form for value in telling_values | _remembered for form in _forms(value)}, key=len, reverse=True
    )


@lru_cache(maxsize=256)
def _forms(value: str) -> tuple[str, ...]:
    """Return the forms in which a value may show up in text.

    These are the value itself, the value as quoted by JSON, Python or a URL, and each of its lines.
    """
    lines = (
        [line for line in value.splitlines() if len(line) >= LINE and "-----" not in line]
        if "\n" in value
        else []
    )
    return value, json.dumps(value)[1:-1], repr(value)[1:-1], urllib.parse.quote(value, safe=""), *lines


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _texts(item)
    else:
        yield str(value)


def _ordinary(name: str, text: str) -> bool:
    """Whether a setting such as prompt_key or pad_token holds an ordinary word, which must not be masked."""
    if not WORD.fullmatch(text):
        return False
    before, last = ["", *(part.lower() for part in PARTS.findall(name))][-2:]
    if last in ("key", "keys"):
        return before not in KEYS
    return before in TOKENS if last == "token" else last not in TELLING and not last.endswith(ENDINGS)


def hides(value: Any) -> bool:
    """Whether the value of a setting with a telling name can be a secret.

    Short numbers can't, even as strings, because flags are strings.
    """
    if value is None or isinstance(value, bool | float):
        return False
    if isinstance(value, str) and NUMBER.fullmatch(value):
        return value.isdigit() and len(value) >= SHORTEST
    return (
        len(str(value)) >= SHORTEST
        if isinstance(value, int)
        else bool(value) and value not in ("true", "false")
    )


def _cleaned(value: Any, values: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return _redacted(value, values)
    if isinstance(value, list | tuple | set | frozenset):
        return [_cleaned(item, values) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return MASK if isinstance(value, int) and str(value) in values else value
    return _masked(value if isinstance(value, str) else str(value), values)
