"""Code runs in real processes behind real walls; the form is SandboxFusion's."""

import base64
import os

import pytest
from served import asking

from rlflow.isolation import probe
from rlflow.serving.code import Code, answered, runner

needs_walls = pytest.mark.skipif(bool(probe.missing()), reason="this machine has not all walls")


@needs_walls
def test_code_reads_its_input_and_files_and_its_streams_come_back():
    files = {"data/numbers.txt": base64.b64encode(b"1 2").decode()}
    with asking(runner(2)) as client:
        health = client.get("/health")[1]
        status, answer = client.post("/run_code", {"code": "import sys\nprint(input(), open('data/numbers.txt').read())\nsys.exit(3)",
                                                   "language": "python", "stdin": "said", "files": files})
    assert set(health["isolation"].values()) == {True}
    assert (status, answer["status"]) == (200, "Failed")
    result = answer["run_result"]
    assert (result["status"], result["return_code"], result["stdout"], result["stderr"]) == ("Finished", 3, "said 1 2\n", "")
    assert answered(Code(code="print(1)"))["status"] == "Success"


@needs_walls
@pytest.mark.parametrize("code", [
    "import socket; socket.socket()", "import os; os.fork()", "import subprocess; subprocess.run(['true'])",
    "file = open('made', 'w'); file.write('x'); file.close()", "open('../made', 'w')", "import os; os.kill(PARENT, 0)",
    "open('/proc/PARENT/environ').read()",
])  # fmt: skip
def test_code_can_only_compute(code):
    assert answered(Code(code=code.replace("PARENT", str(os.getpid()))))["run_result"]["return_code"] != 0


@needs_walls
def test_a_deadline_of_0_is_the_usual_one():
    assert answered(Code(code="print(1)", run_timeout=0))["run_result"]["status"] == "Finished"


@needs_walls
def test_code_that_does_not_end_or_prints_without_end_is_ended():
    result = answered(Code(code="while True: print('x' * 1000)", run_timeout=0.6))["run_result"]
    assert (result["status"], result["return_code"]) == ("TimeLimitExceeded", None)
    assert len(result["stdout"]) <= 1 << 20


@needs_walls
def test_of_much_that_code_prints_the_beginning_is_kept():
    result = answered(Code(code="print('x' * (2 << 20))"))["run_result"]
    assert (result["status"], result["stdout"]) == ("Finished", "x" * (1 << 20))


@pytest.mark.parametrize(("asked", "said"), [
    ({"language": "rust"}, "language: found rust"), ({"fetch_files": ["x"]}, "code may not write files"),
    ({"files": {"../x": ""}}, "files: found the name '../x'"), ({"files": {"x": "!"}}, "files: 'x' is no base64"),
])  # fmt: skip
def test_what_is_not_done_is_said(asked, said):
    answer = answered(Code(code="print(1)", **asked))
    assert (answer["status"], answer["run_result"]) == ("SandboxError", None)
    assert said in answer["message"]
