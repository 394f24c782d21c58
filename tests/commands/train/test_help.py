"""The short help of fit and doctor: quick, one screen, and true."""

import re
import shlex

import pytest
from conftest import print_config, train

from uvit_decay.commands.train.help import FIT, FIT_FLAGS


def help_of(monkeypatch, capsys, folder, *words):
    train(monkeypatch, folder, *words)
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [("fit", "--help"), ("fit", "--config", "digits", "-h"), ("doctor", "--help")])
def test_it_fits_on_a_screen_and_says_where_all_flags_are(monkeypatch, capsys, tmp_path, words):
    monkeypatch.setattr("uvit_decay.commands.train.find_bundled", None)  # nothing is read for it
    text = help_of(monkeypatch, capsys, tmp_path, *words)
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    assert f"python train.py {words[0]} --help_all" in text
    for flag in ("--model.optim.lr", "--data.batch_size", "--trainer.max_steps", "cifar10_uvit_s"):
        assert flag in text


def test_all_flags_are_there_on_demand(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        help_of(monkeypatch, capsys, tmp_path, "fit", "--help-all")
    assert not stop.value.code
    text = capsys.readouterr().out
    for flag in ("--trainer.limit_val_batches", "--resume.allow", "--ckpt_path", "--model.help"):
        assert flag in text


def test_every_flag_of_it_is_one_with_its_example(monkeypatch, capsys, tmp_path):
    lines = re.findall(r"^  (--[\w.]+) ([\w.+-]+)", FIT, re.MULTILINE)
    flags = shlex.split(" ".join(f"{flag}={value}" for flag, value in lines if flag != "--ckpt_path"))
    assert "lr: 0.0001" in print_config(monkeypatch, capsys, tmp_path, "fit", *flags)
    assert len(lines) == len(FIT_FLAGS) == len(set(FIT_FLAGS))
