"""Chat templates render as in transformers. A process renders them, and the run stops it if a template uses
too much.
"""

import os
import re
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import ROOT
from transformers.utils.chat_template_utils import render_jinja_template

from rlflow import PlanError
from rlflow.data import chat, open_data
from rlflow.data.chat import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "lines": "{%- for m in messages %}\n  {{- '<|im_start|>' + m.role + '\\n' + m['content'] | trim "
    "}}<|im_end|>\n{% endfor %}\n{% if add_generation_prompt %}\n    <|im_start|>assistant\n{% endif %}",
    "header": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set offset = 1 %}{{ "
    "messages[0].content }}{% else %}{% set offset = 0 %}{% endif %}{% for m in messages[offset:] %}{% if "
    "(m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% "
    "endif %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
    "reasons": "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}{% set at = "
    "messages|length - 1 - loop.index0 %}{% if m.role == 'user' and ns.last < 0 %}{% set ns.last = at %}{% "
    "endif %}{% endfor %}{% for m in messages %}{% if '</think>' in m.content and loop.index0 < ns.last "
    "%}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m | tojson(indent=2) }}{% endif "
    "%}{% endfor %}",
    "tracked": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ "
    "eos_token }}{% endgeneration %}{% elif not m.content %}{% continue %}{% elif loop.index > 3 %}{% "
    "break %}{% else %}{{ m.content | upper }}{% endif %}{% endfor %}{{ strftime_now('%Y') }}{{ tools }}{{ "
    "documents }}{{ missing }}",
}
CONVERSATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.text() | st.sampled_from(["<think>a</think>\n\nb", " x ", "{{ 7*7 }}"]),
        }
    ),
    min_size=1,
    max_size=5,
)


def by_transformers(text, messages):
    return render_jinja_template([messages], chat_template=text, add_generation_prompt=True, **TOKENS)[0][0]


@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES)
def test_rendered_texts_equal_those_of_transformers(text):
    template = ChatTemplate(Path("model"), text, TOKENS)

    @settings(max_examples=30)
    @given(CONVERSATIONS)
    def equal(messages):
        try:
            expected = by_transformers(text, messages)
        except Exception as error:
            with pytest.raises(PlanError, match=re.escape(f"refuses a prompt: {error}")):
                template.render([messages])
        else:
            assert template.render([messages]) == [expected]

    equal()


ASK = [{"role": "user", "content": "2+2"}]
BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "compiled": "{{ 10 ** (10 ** 9) }}",
    "power": "{% set n = messages | length %}{{ (9 + n) ** ((9 + n) ** 9) }}",
    "string": "{% set n = messages | length %}{{ 'a' * n * 10 ** 10 }}",
    "width": "{% set n = messages | length %}{{ '%999999999d' % n }}{{ '%999999999d' % n }}",
    "doubling": "{% set s = namespace(x='aa') %}{% for i in range(99) %}{% set s.x = s.x + s.x %}{% "
    "endfor %}{{ s.x }}",
    "list": "{% set s = namespace(x=[1]) %}{% for i in range(99) %}{% set s.x = s.x + s.x %}{% endfor "
    "%}{{ s.x }}",
    "output": "{% for a in range(1000) %}{{ 'a' * 1000 }}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "error": "{% set n = messages | length %}{{ raise_exception('a' * n * 10 ** 8) }}",
}
ALIKE = ("power", "width", "doubling", "list", "error")  # templates with the same error message as others


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=name, marks=[pytest.mark.slow] * (name in ALIKE)) for name, text in BOMBS.items()],
)
def test_a_template_with_excessive_use_is_stopped_and_reported(text, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    template = ChatTemplate(
        Path("model"), "{% if messages[0].content == 'bomb' %}" + text + "{% endif %}fine", {}
    )
    if text != BOMBS["compiled"]:  # which never reaches a prompt
        assert template.render([ASK]) == ["fine"]
    with pytest.raises(
        PlanError, match="chat template of model (was stopped while rendering|refuses) a prompt: "
    ) as stopped:
        template.render([[{"role": "user", "content": "bomb"}]])
    assert len(str(stopped.value)) < 4000
    if text != BOMBS["compiled"]:
        assert template.render([ASK]) == ["fine"]


def test_the_error_names_the_limit_that_stopped_a_template(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    for name, words in {
        "loops": "more than 0.35 s of processor time for 1 conversation",
        "string": "more than 1024 MiB of memory",
        "output": "it made a text of 1000000 characters; the limit is 262200",
    }.items():
        with pytest.raises(PlanError, match=words):
            ChatTemplate(Path("model"), BOMBS[name], {}).render([ASK])


def test_a_template_that_fails_on_one_prompt_is_reported_at_its_draw(
    jsonl, make_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    folder = make_tokenizer(tmp_path / "model")
    loops = (
        "{% for m in messages %}{% if 'b' in m.content %}"
        + BOMBS["loops"]
        + "{% endif %}<{{ m.content }}>{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(loops)
    data = open_data(jsonl(*({"prompt": text} for text in "aabac")), tokenizer=folder)
    with pytest.raises(PlanError, match="processor time"):
        data.batch([0, 1, 2, 3])
    assert data.batch([3, 4]).data["prompt_tokens"].lengths.tolist() == [3, 3]


@pytest.mark.slow
def test_a_template_is_stopped_a_limited_number_of_times(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.1)
    template = ChatTemplate(Path("model"), BOMBS["loops"], {})
    for _ in range(chat.STOPS):
        with pytest.raises(PlanError, match="processor time"):
            template.render([ASK])
    monkeypatch.setattr(chat, "SECONDS", 10**6)
    with pytest.raises(
        PlanError, match="was stopped while rendering a prompt: it was stopped 5 times before"
    ):
        template.render([ASK])


def test_a_late_answer_is_not_used_for_the_next_call():
    text = "{% if messages|length > 1 %}{{ raise_exception('long') }}{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(Path("model"), text, {})
    for _ in range(3):
        with pytest.raises(PlanError, match="long"):
            template.render([ASK, ASK * 2, ASK])
        assert template.render([[{"role": "user", "content": str(n)}] for n in range(300)]) == [
            str(n) for n in range(300)
        ]


def test_a_killed_process_is_started_again():
    template = ChatTemplate(Path("model"), "{{ messages[0].content }}", {})
    assert template.render([ASK]) == ["2+2"]
    os.kill(template._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, template._process.pid, os.WEXITED | os.WNOWAIT)
    assert template.render([ASK]) == ["2+2"]


def test_long_conversations_are_rendered_in_portions(monkeypatch):
    monkeypatch.setattr(chat, "PORTION", 100)
    template = ChatTemplate(Path("model"), "{{ messages[0].content }}", {})
    for lengths in ([99, 1, 1], [100], [0] * 300, [500, 1, 98, 1, 1, 700], []):
        texts = [str(number % 10) * length for number, length in enumerate(lengths)]
        assert template.render([[{"role": "", "content": text}] for text in texts]) == texts
    assert [
        len(some) for some in chat._portions([[{"role": "", "content": "a" * n}] for n in (99, 1, 1, 100, 3)])
    ] == [2, 2, 1]


def test_threads_alternate():
    template = ChatTemplate(Path("model"), "{{ messages[0].content }}", {})
    with ThreadPoolExecutor(8) as threads:
        found = list(
            threads.map(lambda n: template.render([[{"role": "user", "content": str(n)}]] * 5), range(100))
        )
    assert found == [[str(n)] * 5 for n in range(100)]


WALKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ '' | attr('__class__') }}",
    "{{ cycler.__init__.__globals__.os.popen('touch MARK') }}",
    "{{ lipsum.__globals__['os'].system('touch MARK') }}",
    "{{ raise_exception.__globals__['sys'].modules['os'].system('touch MARK') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{% set f = ''.format %}{{ '{0.__class__}' | map('format', '') | list }}",
    "{{ ['{0.__class__}'] | map('attr', 'format') | first }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
]


@pytest.mark.parametrize("text", WALKS)
def test_a_template_reaches_only_its_inputs(text, tmp_path):
    mark = tmp_path / "mark"
    try:
        (found,) = ChatTemplate(Path("model"), text.replace("MARK", str(mark)), {}).render([ASK])
    except PlanError:
        found = ""
    assert not mark.exists()
    assert not any(word in found for word in ("<class", "<module", "root:"))


def test_the_process_has_no_secrets_and_no_rights_to_write_or_fork(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "canary-91b2")
    template = ChatTemplate(Path("model"), "{{ messages[0].content }}", {})
    template.render([ASK])
    pid = template._process.pid
    assert b"canary" not in Path(f"/proc/{pid}/environ").read_bytes()
    limits = {
        line[:26].strip(): line[26:].split()[:2]
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
    }
    assert limits["Max file size"] == limits["Max processes"] == limits["Max core file size"] == ["0", "0"]
    assert limits["Max address space"] == [str(1 << 30)] * 2


FOREVER = f"""
import sys
from pathlib import Path
from rlflow.data import chat
from rlflow.data.chat import ChatTemplate
chat.SECONDS = 0.5
template = ChatTemplate(Path("model"), sys.argv[1], {{}})
template.render([{ASK!r}])
print(template._process.pid, flush=True)
template.render([[{{"role": "user", "content": "go"}}]])
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "text",
    ["fine", "{% if messages[0].content == 'go' %}" + BOMBS["loops"] + "{% endif %}"],
    ids=["idle", "busy"],
)
def test_the_process_ends_with_a_killed_run(text):
    with subprocess.Popen(
        [sys.executable, "-c", FOREVER, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        child = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
    assert select.select([child], [], [], 60)[0]  # a busy process lives until its time limit
    os.close(child)


def test_a_user_template_accepts_no_format_width():
    for template in ("{prompt:>999999999}", "{prompt!r}", "{prompt:{prompt}}"):
        with pytest.raises(PlanError, match="must contain {prompt} and no other field"):
            open_data("data.jsonl", template=template)


def test_the_page_states_the_limits():
    page = " ".join((ROOT / "docs" / "security.md").read_text().split())
    assert (
        f"{chat.SECONDS:g} seconds of processor time, and {chat.SECONDS_EACH:g} more for each prompt" in page
    )
    assert f"{chat.LONGEST:,} characters longer than eight times the messages" in page
    assert chat.REPEATS == 8
