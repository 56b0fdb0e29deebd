"""The launcher: a shell hears from it how a run ended, whatever ended it, and what the shell asks the run
hears once."""

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


def apart(run, seen=60.0):
    """Code of a run below a launcher that waits so many seconds for what the run has seen itself."""
    return APART.replace("{run}", run).replace("{seen}", str(seen))


def ended(run, **options):
    return subprocess.run(
        [sys.executable, "-c", apart(run)], capture_output=True, text=True, timeout=240, **options
    )


def test_a_report_of_the_run_stands_for_one_ctrl_c_and_the_next_is_passed_on(monkeypatch):
    """What the kernel sends goes to both processes; of what another process sends, the run says whether it
    came there too."""
    monkeypatch.setattr(process_tag, "adopt", lambda: None)  # orphans of tests are left to who has them
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
    assert above._code(0) == 0  # it has said that it was done
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
def test_the_exit_code_is_that_of_the_run_and_no_run_is_done_that_has_not_said_so(run, code):
    assert ended(run).returncode == code


def test_orphans_of_the_run_end_with_it_though_nothing_tells_whose_they_are():
    run = (
        "import subprocess\n"
        "out = subprocess.run(['sh', '-c', 'setsid sleep 600 >&- & echo $!'], env={}, "
        "stdout=subprocess.PIPE, text=True).stdout\n"
        f"print(out.strip(), flush=True)\n{DONE.format(code=0)}"
    )
    done = ended(run)
    assert done.returncode == 0
    assert gone(int(done.stdout.split()[0]), 0)


def test_orphans_that_end_before_the_run_does_are_seen_off():
    run = (
        "import subprocess\n"
        "out = subprocess.run(['sh', '-c', 'true >&- & echo $!'], env={}, stdout=subprocess.PIPE, "
        "text=True).stdout\n"
        "while os.path.exists(f'/proc/{int(out)}'): time.sleep(0.01)  # until the launcher has collected it\n"
        f"{DONE.format(code=5)}"
    )
    assert ended(run).returncode == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("whom", ["launcher", "run", "both"])
def test_who_asks_is_heard_once(number, whom):
    # the launcher alone: nothing comes that it could wait for
    listens = apart(LISTENS, 60.0 if whom == "both" else 0.2)
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


def test_a_hangup_that_is_ignored_stays_so():
    """As `nohup` has it."""
    with subprocess.Popen(
        [sys.executable, "-c", apart(LISTENS)],
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
        [sys.executable, "-c", apart(LISTENS)], stdout=subprocess.PIPE, text=True
    ) as process:
        run = int(process.stdout.readline())
        process.kill()
        assert gone(run)


def test_the_run_is_told_nothing_by_a_launcher_that_stops():
    """And stopped with it, as by ctrl-Z, it goes on with it."""
    with subprocess.Popen(
        [sys.executable, "-c", apart(LISTENS)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        run = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGSTOP)
        until(lambda: process_tag.stat(run).state == process_tag.stat(process.pid).state == "T")
        os.killpg(process.pid, signal.SIGCONT)
        until(lambda: process_tag.stat(run).state == "S")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130


def test_where_there_are_threads_all_stays_in_one_process():
    text = (
        "import threading, os, time\nfrom rlflow.processes.watchdog import launcher\n"
        "threading.Thread(target=time.sleep, args=(0.5,)).start()\nbefore = os.getpid()\n"
        "print(launcher.apart(), os.getpid() == before, launcher.pipe())"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240)
    assert done.stdout == "None True -1\n"
