"""The global batch is the config's number, in however many micro-batches."""

import csv
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import same
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from refusals import raises_user_error
from runs import StopAt, fit

from uvit_decay.data import Digits


def in_pieces(size, flip=False):
    digits = Digits(32, size)
    digits.flip = flip
    return digits


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run of two epochs of five global batches in one piece, and its options."""
    options = {"max_steps": 8, "limit_train_batches": 5}
    return fit(tmp_path_factory.mktemp("whole"), data=in_pieces(None, flip=True), **options), options


def test_a_global_batch_in_pieces_trains_the_same_network_and_resumes_exactly(whole, tmp_path, caplog):
    whole, options = whole
    cut = fit(tmp_path / "cut", data=in_pieces(8, flip=True), **options)
    assert len(cut[0]) == 4 * 8
    assert "global batch 32 = 1 x 8 images x 4 accumulated" in caplog.messages
    for name, value in whole[1].items():
        torch.testing.assert_close(cut[1][name], value, rtol=0, atol=2e-5)
    for name, value in whole[2].items():
        torch.testing.assert_close(cut[2][name], value, rtol=0, atol=2e-5)
    fit(tmp_path / "half", StopAt(6), data=in_pieces(8, flip=True), **options)
    checkpoint = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = fit(tmp_path / "rest", data=in_pieces(8, flip=True), ckpt_path=checkpoint, **options)
    assert rest[0] == cut[0][4 * 6 :]
    assert same(rest[2], cut[2])


@pytest.mark.parametrize(("first", "then"), [(None, 8), (8, 16)])
def test_a_run_goes_on_in_other_pieces_in_the_middle_of_an_epoch(whole, tmp_path, first, then):
    whole, options = whole
    fit(tmp_path / "half", StopAt(3), data=in_pieces(first, flip=True), **options)
    checkpoint = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = fit(tmp_path / "rest", data=in_pieces(then, flip=True), ckpt_path=checkpoint, **options)
    assert len(rest[0]) == 5 * 32 // (then or 32)
    for name, value in whole[1].items():
        torch.testing.assert_close(rest[1][name], value, rtol=0, atol=2e-5)


def test_the_logged_loss_is_that_of_the_whole_global_batch(tmp_path):
    curves = []
    for size in (None, 8):
        logger = CSVLogger(tmp_path, name=str(size))
        fit(tmp_path / f"{size}", max_steps=5, log_every_n_steps=1, data=in_pieces(size), logger=logger)
        logger.save()
        with Path(logger.log_dir, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        curves.append([float(row["train/loss"]) for row in rows if row.get("train/loss")])
    assert len(curves[0]) == 5
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_ctrl_c_within_a_global_batch_finishes_its_step(tmp_path):
    def interrupt(trainer, task, batch, batch_idx):
        if batch_idx == 9:  # the second of the four pieces of the third batch
            os.kill(os.getpid(), signal.SIGINT)

    whole = fit(tmp_path / "whole", max_steps=6, data=in_pieces(8))
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(tmp_path / "half", LambdaCallback(on_train_batch_start=interrupt), max_steps=6, data=in_pieces(8))
    checkpoint = tmp_path / "half" / "checkpoints" / "last.ckpt"
    rest = fit(tmp_path / "rest", max_steps=6, data=in_pieces(8), ckpt_path=checkpoint)
    assert rest[0] == whole[0][4 * 3 :]
    assert same(rest[2], whole[2])


@pytest.mark.parametrize("size", [None, 8])
def test_accumulation_that_lightning_would_divide_wrongly_is_refused(tmp_path, size):
    with raises_user_error("`accumulate_grad_batches` 2", "`device_batch_size`"):
        fit(tmp_path, max_steps=1, data=in_pieces(size), accumulate_grad_batches=2)
