"""Renders the chat templates of model folders.

A chat template is a program written by a third party. It's rendered in a separate process, which the kernel
kills at a deadline.
"""

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

SECONDS = 10.0  # CPU time for a call; real templates take less than a thousandth of it
SECONDS_EACH = 0.05  # additional seconds for each conversation of a call
# After this many stopped calls, every further call fails at once, because a caller may try each record in
# search of faulty ones.
STOPS = 5
# A rendered conversation may have LONGEST characters plus REPEATS times its own length.
LONGEST = 1 << 18
REPEATS = 8
PORTION = 1 << 22  # maximum number of characters sent at once; the rendering process has limited memory
THOUGHT = "</think>"  # templates recognise the end of a thought by this text
SEPARATE = "make each turn of the assistant a completion of its own, with the earlier turns in its prompt"
PROGRAM = Path(__file__).with_name("rendering.py")
# Variables that rlflow sets for every template.
SET_HERE = ("messages", "tools", "documents", "add_generation_prompt")
QUESTION = "question"  # placeholder for the first turn, used if only the text after that turn is needed
# Placeholder for a reply. Its private-use characters occur in no other text.
REPLY = "\ue000reply\ue000"


class ChatTemplate:
    """The chat template of a tokenizer.

    ``folder``: the model folder, for error messages. ``variables``: the template variables by name, which are
    the tokenizer's special tokens and any variables set by the run.
    """

    def __init__(self, folder: Path, text: str, variables: Mapping[str, Any]) -> None:
        self.folder, self.text, self.variables = folder, text, dict(variables)
        self._lock, self._stops = threading.Lock(), 0
        self._process: Child | None = None
        self._close: Callable[[], object] = lambda: None

    def render(self, conversations: Sequence[Sequence[Message]], prompting: bool = True) -> list[str]:
        """Return the rendered text of each conversation.

        If ``prompting`` is True, the text ends where the assistant's reply begins; otherwise, it ends with
        the last message. Raises PlanError if the template refuses a conversation, or exceeds the limits on
        time, memory or characters.
        """
        with self._lock:
            return [
                text for portion in _portions(conversations) for text in self._rendered(portion, prompting)
            ]

    def reply(self, messages: Sequence[Message], message: Message) -> str:
        """Return what the template writes for an assistant message after ``messages``, with its tool calls.

        The end of the turn isn't included. Raises PlanError if the text around this message isn't the same as
        around a plain reply.
        """
        whole, plain = self.render([[*messages, message], [*messages, _assistant(REPLY)]], prompting=False)
        lead, _, end = plain.partition(REPLY)
        if not whole.startswith(lead):
            raise rewrites(
                self.folder, lead, whole, "give the message as the text that the model should produce"
            )
        if not whole[len(lead) :].endswith(end):
            raise PlanError.of(
                "turns-template",
                f"the chat template of {self.folder} ends a message with {listed(sorted(message))} "
                "differently than a plain reply",
                found=repr(whole[-40:]),
                expected=repr(end),
                remedy="give the message as the text that the model should produce",
            )
        return whole[len(lead) : len(whole) - len(end)]

    def after_reply(
        self,
        opening: Sequence[Message],
        later: Sequence[Sequence[Message]],
        given: tuple[Message, str] | None = None,
    ) -> list[str]:
        """For each list of turns in ``later``, return what the template writes after ``opening`` and a reply.

        ``given``: (a reply, its text as the template writes it); by default, the reply is a placeholder. Some
        templates begin the requested reply with a thought, or write a space before earlier replies; both are
        handled. Raises PlanError if the template changes earlier turns once later turns follow.
        """
        conversations = [[*opening, _assistant(REPLY), *messages] for messages in later]
        exact = [[*opening, given[0], *messages] for messages in later] if given else []
        before, *texts = self.render([opening, *conversations, *exact])
        for text, written in zip(texts, texts[len(later) :], strict=False):
            if given and (wanted := text.replace(REPLY, given[1], 1)) != written:
                raise rewrites(self.folder, wanted, written, SEPARATE)
        return [self._after(before, text) for text in texts[: len(later)]]

    def closed(self, opening: Sequence[Message], more: Sequence[Message], prompting: bool) -> str:
        """Render ``opening``, a placeholder reply and the turns ``more``. Return what follows the reply.

        If ``prompting`` is True, the text ends where the next reply begins. Raises PlanError if the template
        refuses the conversation.
        """
        (text,) = self.render([[*opening, _assistant(REPLY), *more]], prompting)
        return text.partition(REPLY)[2]

    def dropped(self) -> str:
        """Return a phrase for the parts of a reply that the template removes once later turns follow.

        These can be thoughts, and the opening that the template writes for a reply. The phrase is empty if
        the template keeps everything or refuses conversations with later turns.
        """
        question = [{"role": "user", "content": QUESTION}]
        replies = [_assistant(REPLY), _assistant(f"{QUESTION}{THOUGHT}{REPLY}")]
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
        """Return the part of ``text`` after the placeholder reply.

        ``before``: the same conversation up to the reply. One of the two texts may have additional text
        before the reply, which counts as part of it. Raises PlanError if both do.
        """
        lead, reply, after = text.partition(REPLY)
        same = len(os.path.commonprefix([before, lead]))
        if not reply or (before[same:] and lead[same:].strip()):
            raise rewrites(
                self.folder,
                before,
                lead or text,
                "use a model whose template does not change earlier turns",
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
        except BaseException:  # the remaining replies must not reach a later call
            self._end()
            raise
        # The last reply may report that the call was stopped.
        return [self._text(reply, messages) for reply, messages in zip(replies, conversations, strict=False)]

    def _text(self, reply: Mapping[str, str], messages: Sequence[Message]) -> str:
        if "error" in reply:
            raise PlanError.of(
                "chat-template",
                f"the chat template of {self.folder} refuses a prompt: {reply['error']}",
                found=f"roles {listed(message['role'] for message in messages)}",
                expected="roles that the template accepts",
                remedy="correct the messages, or drop such records: --bad-records skip",
            )
        if "limit" in reply:
            raise self._stopped(reply["limit"], messages)
        return reply["text"]

    def _stopped(self, why: str, messages: Sequence[Message]) -> PlanError:
        return PlanError.of(
            "chat-template",
            f"the chat template of {self.folder} was stopped while rendering a prompt: {why}",
            found=f"roles {listed(message['role'] for message in messages)}",
            expected="a template that takes milliseconds and adds little to the messages",
            remedy="correct the template, or use another model; prompts that are plain text need no "
            "template: --data.chat false",
        )

    def _replies(self, request: Mapping[str, Any], limits: Sequence[int]) -> Iterator[dict[str, str]]:
        """Yield the renderer's reply for each conversation.

        Stops after the first conversation that exceeds a limit.
        """
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the missing replies below report that it ended
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        for limit in limits:
            # In JSON, a character can take two escapes of six bytes each.
            line = process.stdout.readline(6 * 2 * limit + 4096)
            reply = json.loads(line) if line.endswith(b"\n") else {"limit": self._died(request)}
            yield reply
            if "limit" in reply:
                self._stops += 1
                self._end()
                return

    def _running(self) -> Child:
        """Return the rendering process, starting it if it isn't running.

        It gets a minimal environment, and a session of its own, so that Ctrl-C doesn't reach it.
        """
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
        """Say how the rendering process ended."""
        process = self._process
        assert process is not None
        self._end()
        if process.returncode == -signal.SIGPROF:
            return (
                f"it took more than {request['seconds']:g} s of processor time for "
                f"{len(request['conversations'])} conversation(s)"
            )
        return f"the process that renders it ended with exit code {process.returncode}"


def check_variables(variables: Mapping[str, Any], template: ChatTemplate | None) -> None:
    """Check the variables that a run sets for a chat template.

    Raises PlanError for variables that rlflow sets itself, or that ``template`` doesn't read.
    """
    set_here = next((name for name in variables if name in SET_HERE), "")
    if set_here:
        raise PlanError.of(
            "data-setting",
            f"'template_kwargs' has '{set_here}', which rlflow sets itself",
            found=set_here,
            expected="other variables, such as enable_thinking",
            remedy=f"remove {set_here}",
        )
    unread = (
        name
        for name in variables
        if template is not None and not re.search(rf"\b{re.escape(name)}\b", template.text)
    )
    if template is not None and (name := next(unread, "")):
        raise PlanError.of(
            "data-setting",
            f"'template_kwargs' has no effect: the chat template of {template.folder} does not read '{name}'",
            found=name,
            expected="a variable that the template reads",
            remedy=f"correct {name}, or remove it",
        )


def rewrites(folder: Path, before: str, after: str, remedy: str) -> PlanError:
    """Return the error for a chat template that changes earlier turns once later turns follow.

    ``before``: the rendered text without later turns. ``after``: the rendered text with them. ``remedy``:
    what the user can do.
    """
    same = len(os.path.commonprefix([before, after]))
    return PlanError.of(
        "turns-template",
        f"the chat template of {folder} changes earlier turns when later ones follow",
        found=repr(after[max(same - 20, 0) : same + 20]),
        expected=repr(before[max(same - 20, 0) : same + 20]),
        remedy=remedy,
    )


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _length(messages: Sequence[Message]) -> int:
    return sum(
        len(part if isinstance(part, str) else json.dumps(part))
        for message in messages
        for part in message.values()
    )


def _portions(conversations: Sequence[Sequence[Message]]) -> Iterator[list[Sequence[Message]]]:
    """Split conversations, in order, into portions of about PORTION characters."""
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
    """Kill the process, and wait until it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.end()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # the process may not have read all input
        process.stdin.close()
