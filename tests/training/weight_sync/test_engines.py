"""vLLM's own models on two tensor-parallel ranks: traced and directly written weights equal vLLM's own
reload, bit for bit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("engine_worker.py")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("vllm_installed")
def test_directly_written_weights_equal_the_reload_of_the_engine(tmp_path):
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
        # names the memory shared by its ranks; the starting process sets it
        "VLLM_DIST_IDENT": f"rlflow-test-{os.getpid()}",
    }
    started = [
        subprocess.Popen(
            [sys.executable, WORKER, tmp_path, str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
        for left in Path("/dev/shm").glob(f"*{environment['VLLM_DIST_IDENT']}*"):
            left.unlink()
    assert [process.returncode for process in started] == [0, 0], "\n".join(err[-3000:] for _, err in ended)
    for out, _ in ended:
        found = json.loads(out.splitlines()[-1])
        assert set(found) == {
            "Qwen3",
            "Qwen3 tied",
            "Llama, one KV head",
            "GPT-2",
            "Gemma 3",
            "Qwen3 renamed",
        }
        for model, facts in found.items():
            assert facts["problems"] == [], model
            assert facts["failed"] == {}, model
            assert facts["by engine"] == {}, model
