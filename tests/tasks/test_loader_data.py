"""A plain Lightning script with a DataLoader of its own."""

import pytest
import torch
from conftest import Losses, tiny_net, tiny_task, tiny_trainer
from small_mae import mae_task
from small_vit import fine_tuning
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from uvit_decay.callbacks import EMA, LinearProbes, Preview
from uvit_decay.checkpoint import load
from uvit_decay.tasks import DiffusionTask, Optimization
from uvit_decay.terminal.errors import UserError


def loader(images=None, labels=None, batch_size=16):
    random = torch.Generator().manual_seed(0)
    images = torch.rand(64, 1, 8, 8, generator=random) * 2 - 1 if images is None else images
    labels = torch.arange(len(images)) % 10 if labels is None else labels
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size)


@pytest.mark.parametrize("make", [tiny_task, mae_task])
def test_a_data_loader_trains_and_its_checkpoint_is_read_and_resumes(tmp_path, make):
    losses = Losses()
    task, trainer = make(), tiny_trainer(tmp_path, losses, EMA(0.9), max_steps=6, limit_val_batches=1)
    trainer.fit(task, loader(), loader())
    assert len(losses.values) == 6
    assert torch.isfinite(trainer.callback_metrics["val/loss"])
    assert task.images_seen == 96
    path = tmp_path / "checkpoints" / "last.ckpt"
    found = load(path)
    assert (found.card.step, found.card.data) == (6, "dataloader")
    more = make()
    tiny_trainer(tmp_path / "more", EMA(0.9), max_steps=8).fit(more, loader(), ckpt_path=path)
    assert more.images_seen == 128


def test_noise_and_times_are_those_of_the_place_in_the_global_batch(tmp_path):
    found = {}
    for parts in (1, 2):
        task, seen = tiny_task(label_dropout=0.1), []
        loss = task.loss
        task.loss = lambda batch, stage, seen=seen, loss=loss: (seen.append(batch.sample_ids), loss(batch, stage))[1]
        trainer = tiny_trainer(tmp_path / str(parts), max_steps=2, accumulate_grad_batches=parts)
        trainer.fit(task, loader(batch_size=16 // parts))
        found[parts] = torch.cat(seen)
    assert torch.equal(found[1], torch.arange(32))
    assert torch.equal(found[2], torch.arange(32))


class Stream(IterableDataset):
    """Images whose number nobody knows before."""

    def __iter__(self):
        yield from zip(torch.zeros(32, 1, 8, 8), torch.arange(32) % 10, strict=True)


def test_a_loader_of_unknown_length_has_no_end_and_a_schedule_needs_one(tmp_path):
    stream = DataLoader(Stream(), batch_size=16)
    for schedule in ({"schedule": "cosine"}, {"schedule": "wsd", "cooldown": 2}):
        task = DiffusionTask(tiny_net(), optim=Optimization(1e-3, warmup_steps=1, **schedule))
        with pytest.raises(UserError, match=r"`max_steps`$"):
            tiny_trainer(tmp_path, max_epochs=2, max_steps=-1).fit(task, stream)
        trainer = tiny_trainer(tmp_path, max_steps=4)
        trainer.fit(task, stream)
        assert trainer.callback_metrics["train/lr"] > 0
    trainer = tiny_trainer(tmp_path, max_epochs=2, max_steps=-1)
    trainer.fit(tiny_task(), stream)
    assert trainer.global_step == 4


def test_bytes_and_images_without_labels_are_taken(tmp_path):
    images = torch.randint(256, (32, 1, 8, 8), dtype=torch.uint8)
    tiny_trainer(tmp_path / "a", Preview(rows=1), max_steps=1).fit(tiny_task(), loader(images))
    assert (tmp_path / "a" / "samples.png").exists()
    alone = DataLoader(TensorDataset(torch.randn(32, 1, 8, 8)), batch_size=16)
    tiny_trainer(tmp_path / "b", max_steps=1).fit(tiny_task(tiny_net(0)), alone)


@pytest.mark.parametrize(
    ("make", "given", "match"),
    [
        (tiny_task, lambda: loader(labels=torch.full((64,), 10)), "num_classes 10"),
        (tiny_task, lambda: loader(torch.arange(2048.0).reshape(32, 1, 8, 8) % 256), "0 to 255"),
        (tiny_task, lambda: DataLoader(TensorDataset(torch.zeros(32, 1, 8, 8)), 16), "1 parts"),
        (tiny_task, lambda: DataLoader(["a"] * 32, 16), "DataLoader"),
        (tiny_task, lambda: [(torch.zeros(4, 1, 8, 8), torch.zeros(4).long())], "batch_size"),
        (fine_tuning, loader, "ClassifyTask"),
    ],
)
def test_other_batches_end_in_one_line_that_says_what_to_pass(tmp_path, make, given, match):
    with pytest.raises(UserError, match=match):
        tiny_trainer(tmp_path, max_steps=1).fit(make(), given())


def test_images_in_0_to_1_are_taken_also_if_resizing_went_beyond(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.fit(tiny_task(), loader(torch.rand(32, 1, 8, 8) * 1.2))
    assert trainer.global_step == 1


def test_a_callback_that_reads_images_needs_a_data_module(tmp_path):
    with pytest.raises(UserError, match="LinearProbes"):
        tiny_trainer(tmp_path, LinearProbes(times=(0.1,)), max_steps=1).fit(tiny_task(), loader())


def test_weights_in_float16_are_refused_before_training(tmp_path):
    task = tiny_task()
    trainer = tiny_trainer(tmp_path, max_steps=1, gradient_clip_val=1.0)
    trainer.strategy.precision_plugin.precision = "16-true"
    with pytest.raises(UserError, match="16-true"):
        trainer.fit(task, loader())
