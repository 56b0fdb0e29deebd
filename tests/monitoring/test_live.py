"""The live view on a pseudo-terminal, and plain lines elsewhere."""

import io
import json
import os
import re
import signal
import threading

import keyed
import pytest
from rich.console import Console

from rlflow.monitoring.frame import Frame, draw, figures, format_duration
from rlflow.monitoring.live import Live, lively
from rlflow.monitoring.outputs import make_reporter
from rlflow.monitoring.plain_display import Plain
from rlflow.monitoring.reporter import Several

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def bare(text):
    """Return terminal output without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_the_view_shows_the_numbers_and_restores_the_cursor(terminal, info, metrics, stages):
    view = make_reporter(stream=terminal.stream)
    view.note("before the start")
    view.start(info)
    view.evaluation(0, keyed.figures({"evaluation/sampled": 0.412, "evaluation/greedy": 0.5}))
    for number in range(4):
        view.iteration(number, metrics, [], stages)
    view.note("in between")
    terminal.wait_for(" s left")
    view.close("done")
    view.close("done")
    view.note("after the end")
    seen = terminal.end()
    for part in (
        "4/12 iterations",
        "reward 0.625",
        "accuracy 41.2%",
        "KL 0.0042",
        "entropy 1.375",
        "length 17.5",
        "truncated 25.0%",
        "tokens/s 12,345",
        "actor.generate",
        "75% 1.5 s",
        "2.0 s each, 1",
        "before the start",
        "in between",
        "after the end",
    ):
        assert part in bare(seen), part
    assert seen.count(HIDE) == seen.count(SHOW) == 1
    assert seen.rindex(SHOW) > seen.rindex(HIDE)
    assert "held-out accuracy after 0 iterations: sampled 41.2%, greedy 50.0% of 64" in bare(seen)
    assert "live view" not in {thread.name for thread in threading.enumerate()}


def test_the_view_draws_the_curve_and_counts_rows(terminal, info, metrics, stages):
    view = Live(terminal.stream)
    view.start(info)
    for number in range(3):
        view.evaluation(
            number, keyed.figures({"evaluation/sampled": 0.25 * number, "evaluation/greedy": 0.5})
        )
        view.iteration(number, metrics | keyed.figures({"fates/trained": 700.0}), [], stages)
    view.close("done")
    seen = bare(terminal.end())
    for part in ("rows trained 2,100", "own/number 7", "0.5 ┤", "  0 ┤•", "└─────"):
        assert part in seen, part


def test_the_last_frame_shows_how_the_run_ended(terminal, info, metrics, stages):
    view = Live(terminal.stream)
    view.start(info)
    view.iteration(0, metrics, [], stages)
    view.close("interrupted")
    assert bare(terminal.end()).rindex("interrupted") > 0


def test_a_terminal_may_change_its_size(terminal, info, metrics, stages):
    view = Live(terminal.stream)
    view.start(info)
    view.iteration(0, metrics, [], stages)
    terminal.resize(40, 24)
    view.close("done")
    frame = bare(terminal.end()).split("1/12 iterations")[-1].splitlines()
    assert max(map(len, frame[1:])) <= 40
    assert any("actor.generate" in line for line in frame)


def test_a_terminal_without_a_size_gets_the_usual_one(terminal, info, metrics, stages):
    terminal.resize(0, 0)
    view = Live(terminal.stream)
    view.start(info)
    view.iteration(0, metrics, [], stages)
    view.close("done")
    assert "actor.generate" in bare(terminal.end())


def test_text_of_a_run_cannot_control_the_terminal(terminal, info, metrics, stages):
    view = Live(terminal.stream)
    view.start(info)
    view.iteration(
        0,
        metrics | keyed.figures({"\x1b]0;x\x07/mean": 1.0, "\x1b]0;x\x07/missing": 0.0}),
        [],
        {"\x1b[31mred": 1.0},
    )
    view.note("\x1b[2Jgone [bold]not markup[/bold]")
    view.close("done")
    seen = terminal.end()
    assert "\x1b[2J" not in seen
    assert "\x1b[31mred" not in seen
    assert "\x1b]" not in seen
    assert "\\x1b[2Jgone [bold]not markup[/bold]" in bare(seen)


def test_missing_or_invalid_numbers_do_not_end_the_view(terminal, info):
    defect = keyed.figures({"reward/mean": "text", "reward/missing": 4.0})  # from the reporting code
    for metrics in (
        {},
        keyed.figures({"reward/mean": float("nan"), "reward/missing": 4.0, "seconds": 0.0}),
        defect,
    ):
        view = make_reporter(stream=terminal.stream)
        view.start(info)
        view.iteration(0, metrics, [], {"a": 0.0})
        view.close("failed", "it broke")
    seen = bare(terminal.end())
    assert "reward nan" in seen
    assert "the live view cannot be drawn: TypeError" in seen


def test_a_failing_view_is_replaced_by_plain_lines(terminal, info, metrics, stages):
    class Broken(Plain):
        def iteration(self, *told):
            raise OSError("no terminal")

    out = io.StringIO()
    reporter = Several(Broken(out), spare=lambda run: Plain(out, run))
    reporter.start(info)
    reporter.iteration(0, metrics, [], stages)
    reporter.iteration(11, metrics, [], stages)
    reporter.close("done")
    assert "broken failed and is not used any more: OSError: no terminal" in out.getvalue()
    assert "12/12 done  reward/mean 0.625" in out.getvalue()


def test_a_report_from_a_signal_comes_after_the_current_one(info, metrics, stages):
    """A stream is not reentrant: neither a print nor a lock."""
    told = []

    class Entered(Plain):
        def note(self, text):
            if text == "outer":
                signal.raise_signal(signal.SIGUSR1)
            told.append(text)

    reporter = Several(Entered(io.StringIO()))
    before = signal.signal(signal.SIGUSR1, lambda number, frame: reporter.note("of the signal"))
    try:
        reporter.note("outer")
        reporter.note("next")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == ["outer", "of the signal", "next"]


def test_reports_of_threads_do_not_overlap():
    """No call is lost or runs within another, and the calls of each thread keep their order."""
    told, within = [], threading.Lock()

    class Alone(Plain):
        def note(self, text):
            assert within.acquire(blocking=False)
            told.append(text)
            within.release()

    reporter = Several(Alone(io.StringIO()))
    threads = [
        threading.Thread(target=lambda name=name: [reporter.note(f"{name}{i}") for i in range(200)])
        for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[text for text in told if text[0] == name] for name in "ab"] == [
        [f"{name}{i}" for i in range(200)] for name in "ab"
    ]


def test_a_lost_terminal_ends_the_view_and_not_the_run(terminal, info, metrics, stages):
    reporter = make_reporter(stream=terminal.stream)
    reporter.start(info)
    terminal.stream.close()
    for number in range(3):
        reporter.iteration(number, metrics, [], stages)
    reporter.close("done")
    assert json.loads((info.folder / "status.json").read_text())["state"] == "done"


def test_pipes_get_lines_first_last_and_every_few_seconds(info, metrics, stages):
    out, now = io.StringIO(), [100.0]
    view = Plain(out, clock=lambda: now[0])
    view.start(info)
    for number in range(12):
        view.iteration(number, metrics, [], stages)
        now[0] += 1.0
    view.evaluation(12, keyed.figures({"evaluation/sampled": 0.5}))
    view.close("done")
    lines = out.getvalue().splitlines()
    assert lines[0] == f"run: {info.folder}"
    assert [line.split("/")[0].strip() for line in lines[1:-1]] == ["1", "4", "7", "10", "12"]
    assert (
        lines[1] == "    1/12 done  reward/mean 0.625  actor.update/loss nan  response/length 17.5  "
        "response/truncated 0.25  2.00 s"
    )
    assert lines[-1] == "held-out accuracy after 12 iterations: sampled 50.0% of 64"
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("term", ["dumb", "unknown", None])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(terminal, monkeypatch, term):
    assert lively(terminal.stream)
    assert not lively(io.StringIO())
    monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM")
    assert not lively(terminal.stream)


def test_quiet_prints_nothing_and_writes_its_state(info, metrics, stages, capfd):
    reporter = make_reporter(quiet=True)
    reporter.note("hello")
    reporter.start(info)
    reporter.iteration(0, metrics, [], stages)
    reporter.close("done")
    assert capfd.readouterr() == ("", "")
    assert json.loads((info.folder / "status.json").read_text())["iteration"] == 12


def test_json_keeps_standard_output_for_itself(info, metrics, stages, capfd):
    reporter = make_reporter(as_json=True)
    reporter.start(info)
    reporter.close("done")
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"run: {info.folder}\n")


@pytest.mark.slow
def test_ctrl_c_restores_the_terminal(terminal, on_terminal, tmp_path):
    """A real run on the terminal is stopped as soon as it shows its first iteration."""
    process = on_terminal(
        "run",
        "ppo",
        "--backend",
        "null",
        "--iterations",
        "100000",
        "--prompts",
        "4",
        "--hp.max_tokens",
        "4",
        "--generate_seconds",
        "0.05",
    )
    terminal.wait_for("actor.generate")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    seen = terminal.end()
    assert seen.count(HIDE) == seen.count(SHOW) == 1
    assert "Traceback" not in seen
    assert json.loads((tmp_path / "runs" / "ppo-1" / "status.json").read_text())["state"] == "interrupted"


@pytest.mark.parametrize(
    ("done", "iterations", "length"), [(0, 0, 0), (0, 1, 0), (1, 1, 40), (1, 2, 20), (2, 2, 40)]
)
def test_the_bar_shows_the_share_of_finished_iterations(done, iterations, length):
    console = Console(
        file=io.StringIO(), width=200, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(
        draw(Frame(flow="ppo", place="runs/ppo-1", state="running", done=done, iterations=iterations), 200)
    )
    bar = next(line for line in console.file.getvalue().splitlines() if "iterations" in line)
    assert bar.partition("\x1b[38;5;237m")[0].count("━") == length  # the color of the remaining part


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("runs/ppo-1", "runs/ppo-1"),
        ("a" * 35, "a" * 35),
        ("ab" + "c" * 30 + "/run", "…" + "c" * 30 + "/run"),
    ],
)
def test_the_title_fills_the_width_and_ends_with_the_name(place, shown):
    console = Console(file=io.StringIO(), width=40, color_system=None)
    console.print(draw(Frame(flow="ppo", place=place, iterations=3), 40))
    assert console.file.getvalue().splitlines()[0].rstrip() == f"ppo  {shown}"


def test_missing_figures_are_skipped():
    assert figures(Frame()) == []
    shares = {"evaluation/sampled": 0.25, "evaluation/one/sampled": 0.25, "evaluation/two/sampled": 0.5}
    assert figures(Frame(evaluation=keyed.figures({"evaluation/sampled": 0.25}), evaluated=3)) == [
        ("accuracy", "25.0% (after 3)")
    ]
    told = [("accuracy of one", "25.0% (after 3)"), ("accuracy of two", "50.0% (after 3)")]
    assert figures(Frame(evaluation=keyed.figures(shares), evaluated=3)) == told
    metrics = keyed.figures({"judge/mean": 0.5, "judge/missing": 0.0, "stage/mean": 3.0})
    assert figures(Frame(metrics=metrics)) == [("judge", "0.500"), ("stage/mean", "3")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (1.0, "1.0 s"), (89, "89.0 s"), (90, "1.5 min"), (7200, "2.0 h"), (172800, "2.0 d")],
)
def test_durations_are_shown_in_a_suitable_unit(seconds, text):
    assert format_duration(seconds) == text
