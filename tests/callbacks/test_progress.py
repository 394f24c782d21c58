"""The bar on a terminal, the lines where there is none, and who gets them."""

import io
import logging
import os
import re
import sys
import time
from unittest.mock import Mock

import pytest
from conftest import ROOT, tiny_task, tiny_trainer, train
from lightning.pytorch.callbacks import LambdaCallback, ProgressBar
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks import Progress
from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.commands.train.launch import Launch
from uvit_decay.data import Digits
from uvit_decay.terminal.progress import track

LOSS = r"loss=\d(\.\d+)?, lr=0\.\d+, images/s=[\d,]+"


class Terminal(io.StringIO):
    """A terminal of 120 columns and 40 rows that keeps what is written to it."""

    def fileno(self) -> int:
        return 2

    @property
    def shown(self) -> list[str]:
        """The bars that were drawn, one after another."""
        return [text.strip() for text in re.split(r"[\r\n]+", self.getvalue()) if text.strip()]


def terminal_of(monkeypatch, columns=120) -> Terminal:
    """Replace standard error by a terminal; call it in the test, after pytest has set its own."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((columns, 40)))
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (120, 40))
    return stream


def steps_of(text):
    """Return the lines that count steps."""
    return [line for line in text.splitlines() if line.startswith("step ")]


def fit(folder, *callbacks, **options):
    trainer = tiny_trainer(folder, *callbacks, **{"log_every_n_steps": 4, "enable_progress_bar": True, **options})
    task = tiny_task()
    trainer.fit(task, Digits(32))
    return trainer, task


def test_a_terminal_gets_one_bar_for_the_whole_run(tmp_path, monkeypatch, capsys):
    terminal = terminal_of(monkeypatch)
    epochs = fit(tmp_path, Progress(every=0), limit_train_batches=3)[0].current_epoch
    assert epochs == 4
    assert re.fullmatch(rf"step 10/10 \|[#█]+\| \d\d:\d\d<00:00, {LOSS}", terminal.shown[-1])
    steps = [int(step) for step in re.findall(r"step (\d+)/10", terminal.getvalue())]
    assert steps == sorted(steps)
    assert not any("loss" in bar for bar in terminal.shown if re.search("step [1-4]/10", bar))  # none is known yet
    left = [line.split("\r")[-1] for line in terminal.getvalue().split("\n")]
    assert sum(line.startswith("step") for line in left) == 1
    assert "v_num" not in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_validation_has_a_bar_of_its_own_below(tmp_path, monkeypatch, capsys):
    terminal = terminal_of(monkeypatch)
    trainer, task = fit(tmp_path, Progress(every=0), limit_val_batches=2, val_check_interval=5, num_sanity_val_steps=1)
    for title in ("sanity check at step 0", "validation at step 5"):
        assert any(re.match(rf"{title}: +\d+%\|.*\| \d/[12] ", bar) for bar in terminal.shown)
    assert any(re.match(r"step 5/10 .*, val/loss=\d", bar) for bar in terminal.shown)
    trainer.validate(task, Digits(32), verbose=False)
    assert re.match(r"validation: 100%\|.*\| 2/2 ", terminal.shown[-1])
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    before = terminal.getvalue()
    trainer.validate(task, Digits(32), verbose=False)
    assert terminal.getvalue() == before
    assert capsys.readouterr().out == ""


def test_messages_stand_above_the_bar(tmp_path, monkeypatch):
    terminal, logger = terminal_of(monkeypatch), logging.getLogger("lightning.pytorch")
    handler = logging.StreamHandler(terminal)
    logger.addHandler(handler)
    before = list(logger.handlers)

    def speak(trainer, *_):
        rank_zero_info(f"a message after step {trainer.global_step}")

    try:
        fit(tmp_path, Progress(every=0), LambdaCallback(on_train_batch_end=speak), max_steps=3)
        assert logger.handlers == before
    finally:
        logger.removeHandler(handler)
    for step in (1, 2, 3):
        assert f"a message after step {step}" in terminal.shown


def test_an_error_closes_the_bar(tmp_path, monkeypatch):
    terminal, broken = terminal_of(monkeypatch), LambdaCallback(on_train_batch_start=Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        fit(tmp_path, Progress(every=0), broken)
    assert terminal.getvalue().endswith("\n")


def test_a_log_file_gets_lines_now_and_then(tmp_path, capsys):
    fit(tmp_path, Progress())
    lines = steps_of(capsys.readouterr().err)
    assert len(lines) == 2  # the first loss, and the end
    for line, step in zip(lines, (5, 10), strict=True):
        assert re.fullmatch(rf"step {step}/10 after \d\d:\d\d, \d\d:\d\d left, {LOSS}", line)


def bars_of(monkeypatch, folder, *flags):
    """Return the progress bars of the trainer that train.py makes."""
    monkeypatch.chdir(folder)
    made = []

    class Built(Launch):
        def _run_subcommand(self, subcommand):
            made.extend(callback for callback in self.trainer.callbacks if isinstance(callback, ProgressBar))

    Built.run(["fit", "--config", str(ROOT / "configs" / "digits.yaml"), "--trainer.logger=false", *flags])
    return made


def test_it_is_the_default_but_a_user_may_have_another_or_none(monkeypatch, tmp_path):
    assert [type(bar) for bar in bars_of(monkeypatch, tmp_path)] == [Progress]
    assert not bars_of(monkeypatch, tmp_path, "--trainer.enable_progress_bar=false")
    (own,) = bars_of(monkeypatch, tmp_path, "--trainer.callbacks+=Progress", "--trainer.callbacks.line_every=7")
    assert own.line_every == 7


def test_a_run_says_nothing_that_nobody_can_act_on(monkeypatch, tmp_path, caplog, capsys):
    flags = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=2", "--trainer.callbacks=Summary"]
    train(monkeypatch, tmp_path, "fit", *flags, "--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=1")
    said = "\n".join(caplog.messages)
    assert "global batch 32 = 1 x 32 images" in said
    assert "step 2/2 after" in capsys.readouterr().err
    assert "run folder: runs/digits/version_0" in said
    for noise in ("GPU available", "TPU", "stopped: `max_steps", "Tip:"):
        assert noise not in said
    settings = (tmp_path / "runs/digits/version_0/config.yaml").read_text()
    assert "callbacks.Summary" in settings
    assert "Progress" not in settings


class Slow(Periodic):
    """An evaluation that takes a while; of the images it counts three."""

    def evaluate(self, trainer, task) -> None:
        with track("images", 5, "image") as work:
            for _ in range(3):
                time.sleep(0.15)
                work.update()

    def evaluations(self, trainer, task) -> int:
        return 5


def test_lines_go_on_while_a_callback_evaluates(tmp_path, capsys):
    fit(tmp_path, Slow(), Progress(line_every=0.1), max_steps=2)
    lines = capsys.readouterr().err.splitlines()
    shown = [line for line in lines if line.startswith("Slow at step 2: images: 3/5 images after ")]
    assert len(shown) == 1
    assert not any("|" in line or "\r" in line for line in lines)


def test_a_terminal_shows_an_evaluation_below_the_bar(tmp_path, monkeypatch):
    terminal = terminal_of(monkeypatch)
    fit(tmp_path, Slow(), Progress(every=0), max_steps=1)
    assert any(re.match(r"images: +60%\|", bar) for bar in terminal.shown)
    assert not any(bar.startswith("Slow at step") for bar in terminal.shown)
