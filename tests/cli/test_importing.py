"""`rlflow import` writes a file, or says what cannot be and writes none."""

import pytest

from rlflow.cli.main import exit_code


def test_refused_settings_end_with_2_and_write_nothing(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.entropy_coeff=0.001\n")
    assert exit_code(["import", "verl", str(script), "-o", str(tmp_path / "run.toml")]) == 2
    assert "actor_rollout_ref.actor.entropy_coeff = 0.001 is not supported" in capsys.readouterr().err
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(("words", "says"), [
    (["verrl", "run.sh"], "nearest:  verl"), (["verl", "nowhere.sh"], "cannot be read"),
    (["verl", "empty.sh"], "starts no trainer of verl"),
    (["openrlhf", "empty.sh"], "starts no trainer of OpenRLHF"),
])  # fmt: skip
def test_what_cannot_be_imported_is_said(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.sh").write_text("echo nothing\n")
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo\n")
    assert exit_code(["import", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run.toml").exists()
