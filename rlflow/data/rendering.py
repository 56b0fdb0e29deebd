"""A program that renders chat templates. These are programs of a model's author, so it limits their time,
memory and output.

It is started by its file and imports nothing of rlflow but the walls of `rlflow.processes.sandbox`. Each line
of standard input is a JSON object with ``template``, ``variables``, ``seconds`` of processor time, and
``conversations``: a list of (messages, most characters of their text). It answers each conversation with a
line: ``{"text": …}``, ``{"error": …}`` where the template refuses it, or ``{"limit": …}`` where it takes too
much. When the time for all conversations is over, the kernel kills the process.

Templates have the sandbox, filters and functions of transformers 5, so that they render the same text.
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

from rlflow.processes.sandbox import limits, walls

MEMORY = 1 << 30  # most bytes of this process
LIMITS = {
    resource.RLIMIT_AS: MEMORY,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_NPROC: 0,
    resource.RLIMIT_CORE: 0,
}


class Generation(Extension):
    """The tag ``{% generation %}``, which marks the assistant's text; its content is rendered as it
    stands."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        """The node of the tag, as jinja2 asks for it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def refuse(message: str) -> None:
    """``raise_exception`` of templates. Raises TemplateError."""
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` of templates, which does not escape HTML as jinja2's own does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def now(form: str) -> str:
    """``strftime_now`` of templates: the local time in this form."""
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def compiled(text: str) -> Template:
    """The template of a text, in a sandbox."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {"raise_exception": refuse, "strftime_now": now}
    return sandbox.from_string(text)


def answer(request: Mapping[str, Any], messages: Any, longest: int) -> bytes:
    """The line that answers one conversation."""
    try:
        return json.dumps(rendered(request, messages, longest)).encode()
    except MemoryError:
        return b'{"limit": "it takes more than %d MiB of memory"}' % (MEMORY >> 20)


def rendered(request: Mapping[str, Any], messages: Any, longest: int) -> dict[str, str]:
    """The text of one conversation, or why there is none. Raises MemoryError."""
    try:
        text = compiled(request["template"]).render(
            **{"tools": None, "documents": None, **request["variables"], "messages": messages}
        )
    except MemoryError:
        raise
    except Exception as error:  # the template may raise whatever it likes
        return {"error": str(error)[:2000] or type(error).__name__}
    return (
        {"text": text}
        if len(text) <= longest
        else {"limit": f"it makes {len(text)} characters of it, of {longest} that it may"}
    )


def limit() -> None:
    """Limit this process to what templates need, as far as the kernel has such limits."""
    limits.take(LIMITS)
    walls.around_templates()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])


def main() -> None:
    """Answer requests until standard input ends."""
    # jinja2 imports modules when it first renders: before the walls stand
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
