"""Renders chat templates in a process of its own, with limits on time, memory and output.

A template is a program written by the model's author. This module runs as a script, and the only part of
rlflow that it imports is `rlflow.processes.sandbox`. Each line of standard input is a JSON object with
``template``, ``variables``, ``seconds`` of CPU time, and ``conversations``: a list of (messages, maximum
number of characters in their text). Each conversation is answered with a line: ``{"text": …}``, ``{"error":
…}`` if the template refuses it, or ``{"limit": …}`` if it exceeds a limit. If the request takes longer than
``seconds``, the kernel kills the process.

Templates get the same Jinja sandbox, filters and functions as in transformers 5, so they render the same
text.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlflow.processes.sandbox import limits, sandboxes

MEMORY = 1 << 30  # maximum size of this process in bytes
LIMITS = {
    resource.RLIMIT_AS: MEMORY,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_NPROC: 0,
    resource.RLIMIT_CORE: 0,
}


class Generation(Extension):
    """Supports the template tag ``{% generation %}`` around the assistant's text, which it leaves unchanged."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        """Return the node of the tag, as jinja2 requires."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def refuse(message: str) -> None:
    """Raise TemplateError. This is the template function ``raise_exception``."""
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to JSON. The template filter ``tojson``, which unlike jinja2's doesn't escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def now(form: str) -> str:
    """Return the local time in the format ``form``. This is the template function ``strftime_now``."""
    return datetime.now().strftime(form)  # noqa: DTZ005 - as transformers does


@lru_cache(maxsize=8)
def compiled(text: str) -> Template:
    """Compile a template's text in a Jinja sandbox."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {"raise_exception": refuse, "strftime_now": now}
    return sandbox.from_string(text)


def answer(request: Mapping[str, Any], messages: Any, longest: int) -> bytes:
    """Render one conversation, and return the output line that answers it.

    ``longest``: the most characters allowed in the rendered text.
    """
    try:
        return json.dumps(rendered(request, messages, longest)).encode()
    except MemoryError:
        return b'{"limit": "it takes more than %d MiB of memory"}' % (MEMORY >> 20)


def rendered(request: Mapping[str, Any], messages: Any, longest: int) -> dict[str, str]:
    """Render one conversation, and return {"text": …}, {"error": …} or {"limit": …}.

    ``longest``: the most characters allowed in the rendered text. Raises MemoryError if memory runs out.
    """
    try:
        text = compiled(request["template"]).render(
            **{"tools": None, "documents": None, **request["variables"], "messages": messages}
        )
    except MemoryError:
        raise
    except Exception as error:  # a template may raise any exception
        return {"error": str(error)[:2000] or type(error).__name__}
    return (
        {"text": text}
        if len(text) <= longest
        else {"limit": f"it made a text of {len(text)} characters; the limit is {longest}"}
    )


def limit() -> None:
    """Limit this process to the resources that templates need, as far as the kernel can."""
    limits.take(LIMITS)
    sandboxes.around_templates()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])


def main() -> None:
    """Answer requests until standard input ends."""
    # jinja2 imports modules at its first rendering, so render once before the sandbox forbids it.
    compiled("{{ messages | tojson }}").render(messages=[{}])
    limit()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        for messages, longest in request["conversations"]:
            sys.stdout.buffer.write(answer(request, messages, longest) + b"\n")
            sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
