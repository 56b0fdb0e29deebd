"""A program that renders chat templates, which are programs of a model's author: with limits, so that none lasts or grows for ever.

It is started by its file and imports of rlflow what puts up walls alone. Each line of standard input is a JSON object with ``template``,
``variables``, ``seconds`` of processor time, and ``conversations``, each as its messages and how many characters they may become. To each
it answers with a line, ``{"text": …}``, ``{"error": …}`` where the template refuses it, or ``{"limit": …}`` where it wants too much. When
the time for all of them is over, the kernel ends the process.

Templates see what they see in transformers 5: the same sandbox, filters and functions, so that they render the same text.
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

from rlflow.isolation import limits, walls

MEMORY = 1 << 30  # bytes of this process
LIMITS = {resource.RLIMIT_AS: MEMORY, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0, resource.RLIMIT_CORE: 0}


class Generation(Extension):
    """``{% generation %}`` marks what the assistant says; what is inside is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def refuse(message: str) -> None:
    raise TemplateError(message)


def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def compiled(text: str) -> Template:
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {"raise_exception": refuse, "strftime_now": now}
    return sandbox.from_string(text)


def answer(request: Mapping[str, Any], messages: Any, longest: int) -> bytes:
    """The line for one conversation."""
    try:
        return json.dumps(rendered(request, messages, longest)).encode()
    except MemoryError:
        return b'{"limit": "it takes more than %d MiB of memory"}' % (MEMORY >> 20)


def rendered(request: Mapping[str, Any], messages: Any, longest: int) -> dict[str, str]:
    """The text of one conversation, or why there is none. Raises MemoryError."""
    try:
        text = compiled(request["template"]).render(messages=messages, tools=None, documents=None, **request["variables"])
    except MemoryError:
        raise
    except Exception as error:  # the template may raise whatever it likes
        return {"error": str(error)[:2000] or type(error).__name__}
    return {"text": text} if len(text) <= longest else {"limit": f"it makes {len(text)} characters of it, of {longest} that it may"}


def limit() -> None:
    """Take from this process what no template needs, as far as the kernel knows such limits."""
    limits.take(LIMITS)
    walls.around_templates()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # who started this may have it ignored or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])


def main() -> None:
    compiled("{{ messages | tojson }}").render(messages=[{}])  # what is imported late is imported now
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
