"""The launcher reports to the shell how a run ended, and passes on the shell's requests to the run once."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from processes import gone, until

from rlflow.processes.watchdog import launcher, process_tag

APART = """
import os, signal, sys, time
from rlflow.processes.watchdog import launcher
from rlflow.processes.watchdog.signals import StopSignals

launcher.SEEN_SECONDS = {seen}
code = launcher.apart()
if code is not None:
    print("launcher", flush=True)
    sys.exit(code)
{run}
"""
DONE = "launcher.done({code}); os._exit({code})"
LISTENS = """
def ask():
    print("asked", flush=True)
    time.sleep(0.5)  # in which it would hear it again
    launcher.done(130)
    os._exit(130)

with StopSignals(ask):
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def run_below(run, seen=60.0):
    """Return the code of a run below a launcher that waits this many seconds for the signals the run has seen
    itself."""
    return APART.replace("{run}", run).replace("{seen}", str(seen))


def launch(run, **options):
    return subprocess.run(
        [sys.executable, "-c", run_below(run)], capture_output=True, text=True, timeout=240, **options
    )


def test_a_reported_ctrl_c_is_passed_on_only_once(monkeypatch):
    """The kernel sends ctrl-C to both processes. For a signal from another process, the run reports if it
    received it too."""
    monkeypatch.setattr(
        process_tag, "adopt", lambda: None
    )  # orphans of tests stay with the process that has them
    monkeypatch.setattr(launcher, "SEEN_SECONDS", 0.01)
    reading, writing = os.pipe()
    above = launcher.Launcher(os.getpid(), reading)

    def received_too(number, code=0):
        return above._received_too(SimpleNamespace(si_signo=number, si_code=code))

    os.write(writing, launcher.SEEN + bytes(1) + launcher.DONE + bytes([3]))
    assert [received_too(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT)] == [
        False,
        True,
        False,
    ]
    assert received_too(signal.SIGINT, code=128)
    assert above._code(0) == 0  # the run has reported that it is done
    os.close(writing)
    assert not received_too(signal.SIGINT)
    os.close(reading)


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (DONE.format(code=0), 0),
        (DONE.format(code=1), 1),
        (DONE.format(code=130), 130),
        ("os._exit(0)", 1),
        ("os._exit(7)", 7),
        ("sys.exit(0)", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.write(launcher.pipe(), b'v\\x01'); os.kill(os.getpid(), signal.SIGKILL)", 1),
        ("os.write(launcher.pipe(), b'v\\x82'); os.kill(os.getpid(), signal.SIGKILL)", 130),
        (DONE.format(code=0).replace("os._exit(0)", "os.kill(os.getpid(), 9)"), -signal.SIGKILL),
    ],
)
def test_the_exit_code_is_that_of_the_run(run, code):
    assert launch(run).returncode == code


def test_unmarked_orphans_of_the_run_end_with_it():
    run = (
        "import subprocess\n"
        "out = subprocess.run(['sh', '-c', 'setsid sleep 600 >&- & echo $!'], env={}, "
        "stdout=subprocess.PIPE, text=True).stdout\n"
        f"print(out.strip(), flush=True)\n{DONE.format(code=0)}"
    )
    done = launch(run)
    assert done.returncode == 0
    assert gone(int(done.stdout.split()[0]), 0)


def test_orphans_that_end_before_the_run_are_reaped():
    run = (
        "import subprocess\n"
        "out = subprocess.run(['sh', '-c', 'true >&- & echo $!'], env={}, stdout=subprocess.PIPE, "
        "text=True).stdout\n"
        "while os.path.exists(f'/proc/{int(out)}'): time.sleep(0.01)  # until the launcher has collected it\n"
        f"{DONE.format(code=5)}"
    )
    assert launch(run).returncode == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("whom", ["launcher", "run", "both"])
def test_each_request_is_passed_on_once(number, whom):
    # the launcher alone: it has nothing to wait for
    listens = run_below(LISTENS, 60.0 if whom == "both" else 0.2)
    with subprocess.Popen(
        [sys.executable, "-c", listens],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        run = int(process.stdout.readline())
        if whom == "both":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if whom == "launcher" else run, number)
        try:
            out, error = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert (process.returncode, out, error) == (130, "asked\nlauncher\n", "")


def test_an_ignored_hangup_stays_ignored():
    """As under `nohup`."""
    with subprocess.Popen(
        [sys.executable, "-c", run_below(LISTENS)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:
        run = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGHUP)
        os.kill(run, signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130


def test_the_run_ends_with_its_launcher():
    with subprocess.Popen(
        [sys.executable, "-c", run_below(LISTENS)], stdout=subprocess.PIPE, text=True
    ) as process:
        run = int(process.stdout.readline())
        process.kill()
        assert gone(run)


def test_a_suspended_launcher_sends_the_run_nothing():
    """If both are suspended, as by ctrl-Z, both continue."""
    with subprocess.Popen(
        [sys.executable, "-c", run_below(LISTENS)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        run = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGSTOP)
        until(lambda: process_tag.stat(run).state == process_tag.stat(process.pid).state == "T")
        os.killpg(process.pid, signal.SIGCONT)
        until(lambda: process_tag.stat(run).state == "S")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130


def test_with_threads_everything_stays_in_one_process():
    text = (
        "import threading, os, time\nfrom rlflow.processes.watchdog import launcher\n"
        "threading.Thread(target=time.sleep, args=(0.5,)).start()\nbefore = os.getpid()\n"
        "print(launcher.apart(), os.getpid() == before, launcher.pipe())"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240)
    assert done.stdout == "None True -1\n"
