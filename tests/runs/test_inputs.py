"""The inputs of a run besides its settings and its graph. If an input changed, resume refuses the run and
names the input, or only reports the change if that is enough."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_faults import MODEL

import rlflow
from rlflow.author.load import algorithms_folder, load, load_flow
from rlflow.config.options import Options
from rlflow.data import open_data
from rlflow.data.encode import Wording
from rlflow.errors import PlanError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import identity, resume
from rlflow.runs.api import resolve_config
from rlflow.runs.depends import Sources, find_dependencies
from rlflow.runs.identity import DigestReader, compare_weights, digest, weight_file
from rlflow.runs.prepare import prepare
from rlflow.runs.session import start_run

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

REWARD = (
    "from scale import times\n\n\ndef score(completion):\n    from inner import add\n    return "
    "times(len(completion)) + add(1)\n"
)
FILES = {
    "judge/rules.py": REWARD,
    "judge/scale.py": "FACTOR = 2\n\n\ndef times(x):\n    return FACTOR * x\n",
    "judge/inner/__init__.py": "from .sums import add\n",
    "judge/inner/sums.py": "import os\n\n\ndef add(x):\n    return x + 1\n",
    "judge/never.py": "not imported\n",
    "tilt.py": "SLOPE = 0.5\n",
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return made(tmp_path_factory.mktemp("ground"))


def made(place):
    """Make a reward with modules of its own, two model folders, data, a flow whose file imports a
    neighbouring module, and a run of one iteration on the null backend. The null backend loads no weights,
    but the run depends on the given ones."""
    for name, content in FILES.items():
        (place / name).parent.mkdir(exist_ok=True, parents=True)
        (place / name).write_text(content)
    for name in ("model", "reference"):
        shutil.copytree(MODEL, place / name)
    rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(40)]
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "mine.py").write_text(
        f"import tilt  # noqa: F401\n{(algorithms_folder() / 'grpo.py').read_text()}"
    )
    keywords = {
        "backend": "null",
        "prompts": 4,
        "iterations": 1,
        "held_out": 4,
        "model": f"{place}/model",
        "out": f"{place}/runs",
        "data": f"{place}/sums.jsonl",
        "reward": f"{place}/judge/rules.py:score",
        "reference": {"model": f"{place}/reference"},
    }
    rlflow.run(f"{place}/mine.py::grpo", **{"hp.beta": 0.1}, **keywords)
    return place


@pytest.fixture
def place(ground, tmp_path):
    return copied(ground, tmp_path / "place")


def copied(ground, place):
    """Copy the inputs and the run to another place; its settings point there."""
    shutil.copytree(ground, place)
    settings = place / "runs/grpo-1/settings.json"
    settings.write_text(settings.read_text().replace(str(ground), str(place)))
    found = place / "runs/grpo-1" / identity.FILE
    found.write_text(found.read_text().replace(str(ground), str(place)))
    return place


@pytest.fixture
def run_folder(place):
    return place / "runs/grpo-1"


class Notes(Quiet):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def go_on(folder, how=resume.resume, **changes):
    load.cache_clear()  # a flow's file is loaded once per process
    said = Notes()
    # resume asks before it runs changed files from elsewhere
    how(folder, {"iterations": 2, **changes}, said, trust=True)
    return said.notes


def edited(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


def config(**changes):
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2))


def flipped(path):
    """Flip one bit and keep the file's length and modification time."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def added(path):
    path.write_text("{{ messages[0].content }}")


CHANGES = {
    "reward": ("judge/rules.py", edited("+ add(1)", "- add(1)"), "rules.py:score: sha256 "),
    "its module": (
        "judge/scale.py",
        edited("FACTOR = 2", "FACTOR = -2"),
        "rules.py:score: scale.py: sha256 ",
    ),
    "its module's module": (
        "judge/inner/sums.py",
        edited("x + 1", "x - 1"),
        "rules.py:score: inner/sums.py: sha256 ",
    ),
    "the flow's module": ("tilt.py", edited("0.5", "0.25"), "flow mine.py: tilt.py: sha256 "),
    "weights": ("model/model.safetensors", flipped, "actor: model.safetensors: sha256 "),
    "weights of the frozen reference": (
        "reference/model.safetensors",
        flipped,
        "reference: model.safetensors: sha256 ",
    ),
    "weights that are gone": ("reference/model.safetensors", Path.unlink, "→ nothing"),
    "configuration": (
        "reference/config.json",
        edited("10000.0", "31.5"),
        "reference: config.json rope_parameters.rope_theta: 10000.0 → 31.5",
    ),
    "end token": (
        "model/generation_config.json",
        config(eos_token_id=7),
        "actor: generation_config.json eos_token_id: 1 → 7",
    ),
    "tokenizer": (
        "model/tokenizer.json",
        edited('"truncation": null', '"truncation":  null'),
        "actor: tokenizer.json: sha256 ",
    ),
    "chat template": ("model/chat_template.jinja", added, "actor: chat_template.jinja: nothing → sha256 "),
    "special token": (
        "model/tokenizer_config.json",
        config(eos_token="!"),
        'actor: tokenizer_config.json eos_token: "',
    ),
    "held-out data": ("sums.jsonl", edited('"answer": "', '"answer": "1'), "held-out records: digest "),
}


QUICK = ("reward", "its module's module", "weights of the frozen reference", "configuration", "held-out data")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in CHANGES]


@pytest.mark.parametrize("kind", KINDS)
def test_resume_refuses_a_changed_input_and_a_fork_accepts_it(kind, place, run_folder):
    file, change, line = CHANGES[kind]
    change(place / file)
    with pytest.raises(PlanError) as caught:
        go_on(run_folder)
    [problem] = caught.value.problems
    assert problem.code == "resume-inputs"
    assert line in problem.found
    assert problem.remedy.endswith(f"rlflow resume {run_folder} --fork")
    if kind in ("reward", "weights of the frozen reference"):
        assert any(line in note for note in go_on(run_folder, resume.fork))


def test_all_changed_inputs_are_named_at_once(place, run_folder):
    for file, change, _ in (CHANGES["reward"], CHANGES["weights"], CHANGES["configuration"]):
        change(place / file)
    with pytest.raises(PlanError) as caught:
        go_on(run_folder)
    assert len(caught.value.problems[0].found.splitlines()) == 3


def renamed_copy(folder):
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda place: edited("FACTOR = 2", "FACTOR = 2  # a comment")(place / "judge/scale.py"),
        lambda place: edited("not imported", "changed")(place / "judge/never.py"),
        lambda place: config(transformers_version="0.0")(place / "model/config.json"),
        lambda place: (place / "model/README.md").write_text("of no matter"),
        lambda place: os.utime(place / "model/model.safetensors"),
        lambda place: renamed_copy(place / "reference"),
    ],
    ids=[
        "a comment",
        "a file that is not imported",
        "who wrote a config",
        "a stranger beside a model",
        "a time",
        "a copy",
    ],
)
def test_irrelevant_differences_are_no_change(change, place, run_folder):
    change(place)
    assert [note for note in go_on(run_folder) if "changed" in note or "cannot check" in note] == []


def test_each_chat_template_variable_is_an_input_of_the_run(place):
    data = open_data(place / "sums.jsonl")
    variables = {"enable_thinking": False, "date": "1 May"}
    parts = [
        find_dependencies(Sources(place / "mine.py", {}, {}, training, data, None), Options()).identity.kept
        for training in (data, replace(data, wording=Wording(template_kwargs=variables)))
    ]
    assert parts[1] == {
        **parts[0],
        "chat template: enable_thinking": "false",
        "chat template: date": '"1 May"',
    }


def recorded(folder, **changes):
    """Change an entry of the run's recorded identity."""
    found = json.loads((folder / identity.FILE).read_bytes())
    for name, values in changes.items():
        found[name] |= values
    (folder / identity.FILE).write_text(json.dumps(found))


def test_changed_versions_and_machines_are_reported_and_recorded(run_folder):
    recorded(run_folder, told={"torch": "1.0", "threads": "99"})
    notes = go_on(run_folder)
    assert any("torch: 1.0 → " in note for note in notes)
    assert any("threads: 99 → " in note for note in notes)
    assert [note for note in go_on(run_folder, iterations=3) if "→" in note] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "left", [None, b"", b"{", b"[" * 9999, b'{"format": "rlflow-identity", "version": 2}']
)
def test_a_run_without_an_identity_resumes_with_a_note(left, run_folder):
    if left is None:
        (run_folder / identity.FILE).unlink()
    else:
        (run_folder / identity.FILE).write_bytes(left)
    assert any("cannot check" in note for note in go_on(run_folder))
    assert identity.read(run_folder).weights


def test_an_unreadable_identity_is_reported_with_the_reason(tmp_path):
    (tmp_path / identity.FILE).write_text('{"format": "another"}')
    with pytest.raises(
        ValueError, match=f"{identity.FILE} cannot be read: Input should be 'rlflow-identity'"
    ):
        identity.read(tmp_path)
    (tmp_path / identity.FILE).unlink()
    (tmp_path / identity.FILE).mkdir()
    with pytest.raises(ValueError, match=f"{identity.FILE} cannot be read: it is not a regular file"):
        identity.read(tmp_path)


def test_unread_weights_are_refused_if_their_file_changed(place, run_folder):
    path, name = place / "reference/model.safetensors", "reference: model.safetensors"
    recorded(run_folder, weights={name: as_of_long_ago(path).model_dump()})
    assert go_on(run_folder)  # the same file: its weights are read now
    assert identity.read(run_folder).weights[name].sha256 == digest(path)
    recorded(run_folder, weights={name: as_of_long_ago(path).model_dump()})
    os.utime(path)
    with pytest.raises(PlanError, match="not read before the run was stopped → another file"):
        go_on(run_folder, iterations=3)


def as_of_long_ago(path):
    """Date the file's modification back, as if the file were old."""
    return weight_file(path).model_copy(update={"recent": False})


def test_untouched_files_are_not_read_again(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    # not the file's digest, so that reading the file would be noticed
    before = {"w": as_of_long_ago(path).with_digest("0" * 64)}
    assert compare_weights(before, {"w": weight_file(path)}, {"w": path}, print)[1] == []
    recent = {"w": before["w"].model_copy(update={"recent": True})}
    assert len(compare_weights(recent, {"w": weight_file(path)}, {"w": path}, print)[1]) == 1
    changed = path.stat().st_ctime_ns
    assert [
        weight_file(path, lambda now=changed + later: now).recent for later in (0, 2 * 10**9 - 1, 2 * 10**9)
    ] == [True, True, False]


@given(st.binary(min_size=1, max_size=64), st.data())
def test_any_changed_byte_is_noticed(tmp_path_factory, content, data):
    path = tmp_path_factory.mktemp("weights") / "weights"
    path.write_bytes(content)
    before = {"w": weight_file(path).with_digest(digest(path))}
    place = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    path.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
    _, changes = compare_weights(before, {"w": weight_file(path)}, {"w": path}, print)
    assert [change.name for change in changes] == ["w"]


def test_files_that_others_may_have_touched_are_read_again(tmp_path, monkeypatch):
    paths = {name: tmp_path / name for name in ("a", "b", "c")}
    for name, path in paths.items():
        path.write_bytes(name.encode() * 500)
    now = {name: weight_file(path) for name, path in paths.items()}
    before = {
        name: file.with_digest(digest(paths[name]) if name != "b" else "0" * 64) for name, file in now.items()
    }
    before |= {"gone": before["a"]}
    for large, lines in ((1500, []), (1499, [r"reading 1\.0 GiB of weights", r"read the weights in 0 s"])):
        monkeypatch.setattr(identity, "LARGE", large)
        said = []
        files, changes = compare_weights(before, now, paths, said.append)
        assert [re.match(line, text) is not None for line, text in zip(lines, said, strict=True)] == [
            True
        ] * len(lines)
        assert {name: file.sha256 for name, file in files.items()} == {
            name: digest(path) for name, path in paths.items()
        }
        assert [(change.name, change.before, change.now) for change in changes] == [
            ("b", f"sha256 {'0' * 64}", f"sha256 {digest(paths['b'])}"),
            ("gone", f"sha256 {digest(paths['a'])}", identity.GONE),
        ]


def test_weights_changed_while_loading_are_never_resumed(tmp_path):
    path, put, said = tmp_path / "weights", [], []
    path.write_bytes(b"first")
    known = identity.Identity(weights={"w": weight_file(path)})
    path.write_bytes(b"second")
    DigestReader(known, {"w": path}, put.append, said.append).start().wait(60)
    assert "cannot be resumed" in said[0]
    [change] = compare_weights(put[0].weights, {"w": weight_file(path)}, {"w": path}, print)[1]
    assert change.before == identity.UNSTEADY


def test_an_unused_input_is_not_recorded_as_empty(tmp_path):
    """Otherwise a resumed run would report every input as changed."""
    flow = load_flow("grpo")
    config, hp = resolve_config(
        flow, None, {"backend": "null", "prompts": 4, "iterations": 1, "out": str(tmp_path)}
    )
    folder = start_run(prepare(flow, hp, config, judge=None), Quiet()).folder
    assert identity.read(folder) is None
    assert any("cannot check" in note for note in go_on(folder))


def test_the_history_of_a_run_names_its_inputs(place, run_folder, capsys):
    from rlflow.cli.watch import show_run

    show_run(str(run_folder))
    shown = capsys.readouterr().out
    assert "depends on" in shown
    assert "reference: model.safetensors sha256 " in shown
    assert "torch " in shown
