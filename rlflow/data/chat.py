"""Chat templates of model folders. They are programs that strangers wrote, so another process renders them,
which the kernel kills at a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.author.messages import Message
from rlflow.errors import PlanError, listed
from rlflow.processes.children import Child
from rlflow.processes.sandbox import limits

SECONDS = 10.0  # of processor time for a call; real templates take less than a thousandth of it
SECONDS_EACH = 0.05  # more for each conversation of a call
# after so many stopped calls none is tried any more: a caller may look for the faulty records one after
# another
STOPS = 5
# characters that a template may add to a conversation of which it repeats no part more than REPEATS times
LONGEST = 1 << 18
REPEATS = 8
PORTION = 1 << 22  # characters that are sent at once, since the memory of the rendering process is limited
THOUGHT = "</think>"  # with which templates know the end of a thought
SEPARATE = "give each turn of the assistant as a completion of its own, with what came before in its prompt"
PROGRAM = Path(__file__).with_name("rendering.py")
# variables that rlflow gives a template
SET_HERE = ("messages", "tools", "documents", "add_generation_prompt")
QUESTION = "question"  # what stands for any first turn where only what follows it is wanted
# what stands for any reply; characters for private use, so that no other text has it
REPLY = "\ue000reply\ue000"


class ChatTemplate:
    """The chat template of a tokenizer. ``folder``: the model, for messages. ``variables``: the tokenizer's
    special tokens, which templates use by name."""

    def __init__(self, folder: Path, text: str, variables: Mapping[str, Any]) -> None:
        self.folder, self.text, self.variables = folder, text, dict(variables)
        self._lock, self._stops = threading.Lock(), 0
        self._process: Child | None = None
        self._close: Callable[[], object] = lambda: None

    def render(self, conversations: Sequence[Sequence[Message]], prompting: bool = True) -> list[str]:
        """The text of each conversation, up to where the assistant begins its reply (``prompting``), or with
        nothing after the last message. Raises PlanError where the template refuses a conversation, or takes
        more time, memory or characters than any template should."""
        with self._lock:
            return [
                text for portion in _portions(conversations) for text in self._rendered(portion, prompting)
            ]

    def reply(self, messages: Sequence[Message], message: Message) -> str:
        """The text of a message of the assistant after ``messages``: with its calls of tools, without the end
        of a turn. Raises PlanError for a template that writes it otherwise than a reply in its place."""
        whole, plain = self.render([[*messages, message], [*messages, _said(REPLY)]], prompting=False)
        lead, _, end = plain.partition(REPLY)
        if not whole.startswith(lead):
            raise rewrites(self.folder, lead, whole, "give the message as a text, as the model is to say it")
        if not whole[len(lead) :].endswith(end):
            raise PlanError.of(
                "turns-template",
                f"the chat template of {self.folder} ends a message with {listed(sorted(message))} "
                "otherwise than a plain reply",
                found=repr(whole[-40:]),
                expected=repr(end),
                remedy="give the message as a text, as the model is to say it",
            )
        return whole[len(lead) : len(whole) - len(end)]

    def after_reply(
        self,
        opening: Sequence[Message],
        later: Sequence[Sequence[Message]],
        given: tuple[Message, str] | None = None,
    ) -> list[str]:
        """The text that further turns are after ``opening`` and a reply: any, or this message, which the
        template writes as this text. A template may begin the reply that it asks for with a thought, or write
        a space before those that it has. Raises PlanError for a template that writes earlier turns otherwise
        once there are later ones."""
        conversations = [[*opening, _said(REPLY), *messages] for messages in later]
        exact = [[*opening, given[0], *messages] for messages in later] if given else []
        before, *texts = self.render([opening, *conversations, *exact])
        for text, written in zip(texts, texts[len(later) :], strict=False):
            if given and (wanted := text.replace(REPLY, given[1], 1)) != written:
                raise rewrites(self.folder, wanted, written, SEPARATE)
        return [self._after(before, text) for text in texts[: len(later)]]

    def closed(self, opening: Sequence[Message], more: Sequence[Message], prompting: bool) -> str:
        """The text after a reply that stands for any, with ``more`` turns after it. Raises PlanError where
        the template refuses them."""
        (text,) = self.render([[*opening, _said(REPLY), *more]], prompting)
        return text.partition(REPLY)[2]

    def dropped(self) -> str:
        """What of a reply the template writes no more once there are later turns, in words: that with which
        it opens the reply that it asks for, and thoughts. Empty for a template that keeps all, and for one
        that refuses such conversations."""
        question = [{"role": "user", "content": QUESTION}]
        replies = [_said(REPLY), _said(f"{QUESTION}{THOUGHT}{REPLY}")]
        try:
            before, plain, thoughtful = self.render(
                [question, *([*question, reply, *question] for reply in replies)]
            )
        except PlanError:
            return ""
        opened = before[len(os.path.commonprefix([before, plain.partition(REPLY)[0]])) :]
        kept = f"{QUESTION}{THOUGHT}{REPLY}" in thoughtful
        return " and ".join(
            [
                *([f"{opened!r}, with which it opens a reply,"] if opened else []),
                *([] if kept else ["thoughts"]),
            ]
        )

    def _after(self, before: str, text: str) -> str:
        """What stands in ``text`` after the reply to what ``before`` asks. Either may have something between
        the same beginning and the reply, which is a part of the reply; where both have, the beginning is not
        the same."""
        lead, reply, after = text.partition(REPLY)
        same = len(os.path.commonprefix([before, lead]))
        if not reply or (before[same:] and lead[same:].strip()):
            raise rewrites(
                self.folder,
                before,
                lead or text,
                "name a model whose template leaves earlier turns as they are",
            )
        return after

    def _rendered(self, conversations: Sequence[Sequence[Message]], prompting: bool) -> list[str]:
        limits = [LONGEST + REPEATS * _length(messages) for messages in conversations]
        request = {
            "template": self.text,
            "variables": self.variables | {"add_generation_prompt": prompting},
            "seconds": SECONDS + SECONDS_EACH * len(conversations),
            "conversations": list(zip(map(list, conversations), limits, strict=True)),
        }
        if self._stops == STOPS:
            raise self._stopped(f"it was stopped {STOPS} times before", conversations[0])
        try:
            replies = list(self._replies(request, limits))
        except BaseException:  # what is still to come belongs to no later call
            self._end()
            raise
        # the last may be a stop
        return [self._text(reply, messages) for reply, messages in zip(replies, conversations, strict=False)]

    def _text(self, reply: Mapping[str, str], messages: Sequence[Message]) -> str:
        if "error" in reply:
            raise PlanError.of(
                "chat-template",
                f"the chat template of {self.folder} refuses a prompt: {reply['error']}",
                found=f"roles {listed(message['role'] for message in messages)}",
                expected="roles that the template takes",
            )
        if "limit" in reply:
            raise self._stopped(reply["limit"], messages)
        return reply["text"]

    def _stopped(self, why: str, messages: Sequence[Message]) -> PlanError:
        return PlanError.of(
            "chat-template",
            f"the chat template of {self.folder} is stopped at a prompt: {why}",
            found=f"roles {listed(message['role'] for message in messages)}",
            expected="a template that takes milliseconds and adds little to what is said",
            remedy="correct the template, or take another model; prompts that are texts need none: "
            "--data.chat false",
        )

    def _replies(self, request: Mapping[str, Any], limits: Sequence[int]) -> Iterator[dict[str, str]]:
        """The reply for each conversation, up to and with the first that is stopped."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the missing replies below say that it ended
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        for limit in limits:
            # a character may be two escapes of six bytes
            line = process.stdout.readline(6 * 2 * limit + 4096)
            reply = json.loads(line) if line.endswith(b"\n") else {"limit": self._died(request)}
            yield reply
            if "limit" in reply:
                self._stops += 1
                self._end()
                return

    def _running(self) -> Child:
        """The rendering process, started where there is none or it has ended. It gets a bare environment, and
        a session of its own, so that ctrl-C does not reach it."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        process = Child(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=limits.environment(os.sep),
        )
        self._process = process
        self._close = weakref.finalize(self, _ended, process)
        return process

    def _end(self) -> None:
        self._close()
        self._process = None

    def _died(self, request: Mapping[str, Any]) -> str:
        """A text that says how the process ended."""
        process = self._process
        assert process is not None
        self._end()
        if process.returncode == -signal.SIGPROF:
            return (
                f"it takes more than {request['seconds']:g} s of processor time for "
                f"{len(request['conversations'])} of them"
            )
        return f"the process that renders it ended with {process.returncode}"


def check_variables(variables: Mapping[str, Any], template: ChatTemplate | None) -> None:
    """Raises PlanError for variables of a chat template that rlflow sets, and for one that ``template`` does
    not read."""
    set_here = next((name for name in variables if name in SET_HERE), "")
    if set_here:
        raise PlanError.of(
            "data-setting",
            f"'template_kwargs' has '{set_here}', which rlflow itself gives the chat template",
            found=set_here,
            expected="other variables, such as enable_thinking",
            remedy=f"leave {set_here} out",
        )
    unread = (
        name
        for name in variables
        if template is not None and not re.search(rf"\b{re.escape(name)}\b", template.text)
    )
    if template is not None and (name := next(unread, "")):
        raise PlanError.of(
            "data-setting",
            f"'template_kwargs' has no effect: the chat template of {template.folder} reads no '{name}'",
            found=name,
            expected="a variable that the template reads",
            remedy=f"correct {name}, or leave it out",
        )


def rewrites(folder: Path, before: str, after: str, remedy: str) -> PlanError:
    """The refusal of a template that wrote ``before``, and of the same turns with later ones ``after``."""
    same = len(os.path.commonprefix([before, after]))
    return PlanError.of(
        "turns-template",
        f"the chat template of {folder} writes earlier turns otherwise once later ones come",
        found=repr(after[max(same - 20, 0) : same + 20]),
        expected=repr(before[max(same - 20, 0) : same + 20]),
        remedy=remedy,
    )


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _length(messages: Sequence[Message]) -> int:
    """The number of characters of the messages."""
    return sum(
        len(part if isinstance(part, str) else json.dumps(part))
        for message in messages
        for part in message.values()
    )


def _portions(conversations: Sequence[Sequence[Message]]) -> Iterator[list[Sequence[Message]]]:
    """The conversations in order, in portions of about PORTION characters."""
    portion: list[Sequence[Message]] = []
    size = 0
    for messages in conversations:
        portion.append(messages)
        size += _length(messages)
        if size >= PORTION:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _ended(process: Child) -> None:
    """Kill the process, and wait until it is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.end()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # what it did not read any more
        process.stdin.close()
