"""Finds the tokens that end a model's replies, from its chat template, configs and tokenizer.

Sampling stops at these tokens, and responses in the data end with one of them. Between two turns, rlflow
inserts what the template writes after the end token.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlflow.data.chat import QUESTION, ChatTemplate
from rlflow.errors import PlanError, Problem
from rlflow.training import pretrained

CHAT, TEXT = "chat template", "tokenizer"  # sources of end tokens other than config files


@dataclass(frozen=True)
class Ends:
    """The tokens that end replies of the model in ``folder``."""

    folder: Path
    named: Mapping[str, tuple[int, ...]]  # source (a config file, CHAT or TEXT) → its end tokens
    words: Mapping[int, str]  # token → its text, as far as it is known
    space: str = ""  # white space that the chat template writes between a reply and its end token
    # True if the template writes its end token after every reply, including the last; False if the token
    # begins the next turn.
    always: bool = False
    chats: bool = False  # True if the folder has a chat template that can write a reply

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens that end a reply, in ascending order."""
        return tuple(sorted({token for tokens in self.named.values() for token in tokens}))

    @property
    def of_chat(self) -> int | None:
        """The token that the chat template writes after a reply, or None if there is none."""
        return next(iter(self.named.get(CHAT, ())), None)

    @property
    def of_text(self) -> int | None:
        """The token that ends a response to a plain-text prompt, or None if there is none.

        It's the tokenizer's end of text, or else the first end token in a config.
        """
        sources = (TEXT, pretrained.GENERATION, pretrained.CONFIG)
        return next((token for source in sources for token in self.named.get(source, ())), None)

    @property
    def served(self) -> tuple[int, ...]:
        """The tokens at which other programs, such as inference servers, stop sampling with this folder."""
        return next(
            (
                tokens
                for name in (pretrained.GENERATION, pretrained.CONFIG, TEXT)
                if (tokens := self.named.get(name))
            ),
            (),
        )

    def written(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return a generation config that names all end tokens, by file name.

        ``files``: contents of the folder's configs, by file name. Returns an empty dict if they already name
        all end tokens, or if a config can't be read.
        """
        try:
            own = json.loads(files.get(pretrained.GENERATION, b"{}"))
            config = json.loads(files[pretrained.CONFIG])
        except (ValueError, KeyError):
            return {}  # not a model folder that other programs could read
        if (
            not self.ids
            or set(self.ids) <= set(self.served)
            or not isinstance(own, dict)
            or not isinstance(config, dict)
        ):
            return {}
        first = {
            name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None
        }
        return {
            pretrained.GENERATION: json.dumps(
                {**first, **own, "eos_token_id": list(self.ids)}, indent=2
            ).encode()
            + b"\n"
        }

    @property
    def problems(self) -> list[Problem]:
        """Return warnings if the folder's files disagree on the end tokens or the template writes none."""
        found = (
            "; ".join(f"{name}: {self._described(tokens)}" for name, tokens in self.named.items())
            or "no end token"
        )
        problems, file = [], self.folder / pretrained.GENERATION
        if {token for name in (CHAT, TEXT) for token in self.named.get(name, ())} - set(self.served):
            remedy = (
                f'"eos_token_id": {list(self.ids)} in {file}; rlflow ends replies at each of them, and '
                "names all of them in the config "
                "that it writes into final/"
            )
            problems.append(
                Problem(
                    "model-ends",
                    f"the files of {self.folder} name different tokens as the end of a reply",
                    found=found,
                    expected=f"{file.name} to name all of them: other programs do not stop at a token "
                    "that it does not name",
                    remedy=remedy,
                    severity="warning",
                )
            )
        if self.chats and self.of_chat is None:
            remedy = (
                "a template that writes one of these after each assistant message; with this one, "
                "the token that ended the reply precedes the template's text"
            )
            problems.append(
                Problem(
                    "model-ends",
                    f"the chat template of {self.folder} writes no token that ends a reply",
                    found=found,
                    expected="a token between a reply and the next turn",
                    remedy=remedy,
                    severity="warning",
                )
            )
        return problems

    def _described(self, tokens: Sequence[int]) -> str:
        return ", ".join(
            f"{self.words[token]} ({token})" if token in self.words else str(token) for token in tokens
        )


Variables = Mapping[str, Any]  # additional variables of the chat template
NONE: Variables = MappingProxyType({})
_known: dict[tuple[Path, str], tuple[object, Ends]] = {}  # by folder and variables


def ends_of(
    folder: Path, variables: Variables = NONE, rendering: Callable[[], ChatTemplate] | None = None
) -> Ends:
    """Return the end tokens of the model in ``folder``.

    Reads the folder's files, and loads the tokenizer only if they don't name the end-of-text token.
    Unreadable files are ignored, because they are reported when the model is loaded. ``variables``:
    additional variables of the chat template. ``rendering``: returns the chat template, if the caller already
    has one with these variables.
    """
    folder = folder.absolute()
    key = (folder, repr(sorted(variables.items())))
    stamp, (known, ends) = _stamp(folder), _known.get(key, (None, None))
    if ends is None or known != stamp:
        template = template_of(folder, variables)
        if template is not None and rendering is not None:
            with contextlib.suppress(PlanError):  # the folder may have several templates and no default
                template = rendering()
        ends = _ends(folder, template)
        _known[key] = stamp, ends
    return ends


def _stamp(folder: Path) -> tuple[object, ...]:
    """Return a value that changes whenever the folder's configs, tokenizer or chat template do."""
    names = (
        pretrained.CONFIG,
        pretrained.GENERATION,
        pretrained.TOKENIZER,
        pretrained.VOCABULARY,
        pretrained.TOKENS,
        pretrained.TEMPLATE,
    )
    stats = [path.stat() if (path := folder / name).is_file() else None for name in names]
    return tuple((each.st_mtime_ns, each.st_size) if each else None for each in stats)


def _ends(folder: Path, template: ChatTemplate | None) -> Ends:
    configs = {name: tokens for name, tokens in pretrained.read_end_tokens(folder).items() if tokens}
    added, end = pretrained.read_added_tokens(folder), pretrained.read_special_tokens(folder)["eos_token"]
    if end not in added:
        added, end = _loaded(folder, added)
    text = {TEXT: (added[end],)} if end in added else {}
    words = {number: word for word, number in added.items()}
    if template is None:
        return Ends(folder, configs | text, words)
    after, alone = _after_reply(template)
    space, token = closing(after or "", added)
    always = alone is None or closing(alone, added)[1] == token
    own = token is not None and (
        always or any(token in tokens for tokens in (*configs.values(), *text.values()))
    )
    of_chat: dict[str, tuple[int, ...]] = {CHAT: (token,)} if own and token is not None else {}
    return Ends(folder, of_chat | configs | text, words, space if own else "", always, after is not None)


def template_of(folder: Path, variables: Variables = NONE) -> ChatTemplate | None:
    """Return the chat template of ``folder`` for prompts without tools, or None if it has no template."""
    templates = pretrained.read_templates(folder)
    text = templates.get(pretrained.DEFAULT_TEMPLATE) or templates.get(pretrained.TOOL_TEMPLATE)
    return (
        ChatTemplate(folder, text, {**pretrained.read_special_tokens(folder), **variables})
        if text is not None
        else None
    )


def closing(after: str, added: Mapping[str, int]) -> tuple[str, int | None]:
    """Return the end token that begins the text after a reply, as (white space before it, token id).

    ``added``: ids of the tokens outside the base vocabulary, by text. The id is None if the text doesn't
    begin with one of them.
    """
    rest = after.lstrip()
    word = max((word for word in added if rest.startswith(word)), key=len, default=None)
    return (after[: len(after) - len(rest)], added[word]) if word is not None else ("", None)


def _after_reply(template: ChatTemplate) -> tuple[str | None, str | None]:
    """Return what the template writes after a reply: (before a user turn, at the conversation's end).

    Either is None if the template refuses the conversation.
    """
    texts: list[str | None] = []
    for more, prompting in (([{"role": "user", "content": QUESTION}], True), ([], False)):
        try:
            texts.append(template.closed([{"role": "user", "content": QUESTION}], more, prompting))
        except PlanError:
            texts.append(None)
    return texts[0], texts[1]


def _loaded(folder: Path, added: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """Load the tokenizer, and return (its added tokens, its end-of-text token).

    ``added``: the added tokens named in the folder's files. The tokenizer's class may define more.
    """
    if not any((folder / name).is_file() for name in (pretrained.TOKENIZER, pretrained.VOCABULARY)):
        return dict(added), ""  # transformers would invent a tokenizer for some models
    try:
        tokenizer = pretrained.read_tokenizer(folder)
    except Exception:  # any error for malformed files; encoding reports it later
        return dict(added), ""
    end = tokenizer.eos_token
    own = {
        **added,
        **{
            str(word): int(number)
            for word, number in tokenizer.added_tokens_encoder.items()
            if str(word).strip()
        },
    }
    return {**own, **({str(end): int(tokenizer.eos_token_id)} if end is not None else {})}, str(end or "")
