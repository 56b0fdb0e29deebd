"""Several runs on one Ray at once do not disturb each other; each ends like alone."""

import json

import pytest

import rlflow

SMALL = {"backend": "null", "iterations": 3, "hp.samples": 2, "hp.max_tokens": 8}
TIMES = ("seconds", "response/tokens_per_second")
SECONDS = 120.0
MEET = f"""
import time
from pathlib import Path

HERE = Path(__file__).parent

def there():
    return len(list(HERE.parent.glob("*/there"))) == 2

def both(completion):
    "Scores nothing before both runs are there."
    (HERE / "there").touch()
    limit = time.monotonic() + {SECONDS}
    while not there() and time.monotonic() < limit:
        time.sleep(0.02)
    return float(len(completion)) if there() else None
"""


def reported(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.mark.long
def test_two_runs_with_equal_pool_names_share_a_ray(tmp_path, ray_address, launch):
    folders = {6: tmp_path / "six", 7: tmp_path / "seven"}  # by prompts: misdirected rows would show
    started = []
    for prompts, folder in folders.items():
        folder.mkdir()
        (folder / "meet.py").write_text(MEET)
        started.append(
            launch(
                "grpo",
                pools="all=2",
                ray_address=ray_address,
                prompts=prompts,
                reward=f"{folder}/meet.py:both",
                reward_write=folder,
                out=folder,
                name="run",
                **SMALL,
            )
        )
    for process in started:
        said, _ = process.communicate(timeout=2 * SECONDS)
        assert process.returncode == 0, said
    for prompts, folder in folders.items():
        here = rlflow.run(
            "grpo",
            out=str(folder),
            name="alone",
            prompts=prompts,
            reward=[f"{folder}/meet.py:both"],
            reward_write=(str(folder),),
            **SMALL,
        )
        one, other = reported(here.folder), reported(folder / "run")
        assert [line.keys() for line in one] == [line.keys() for line in other]
        for number, line in enumerate(one):
            assert other[number] == pytest.approx(line, rel=1e-6, nan_ok=True)
