"""Latents read and trained on: workers, damaged folders, posterior samples, what does not fit."""

import json
import pickle
from functools import partial

import pytest
import torch
from conftest import Losses, save_tiny_vae, tiny_trainer
from latent_files import COUNT, copy_set, encode, open_set
from refusals import raises_user_error
from runs import latent_task

from uvit_decay.checkpoint import load
from uvit_decay.data import Latents
from uvit_decay.data.batches import StepLoader, StepSampler, mirror_half
from uvit_decay.latents.shards import write_labels

SHARD = "shard-00003-of-00006.safetensors"


def test_a_set_is_sent_to_workers_by_name_and_reads_the_same_there(encoded):
    stored = open_set(encoded)
    stored[[0, 7, 21]]
    assert len(pickle.dumps(stored)) < 5000
    augment = partial(mirror_half, 3)
    loaders = [StepLoader(stored, StepSampler(COUNT, 5, 0, 0, 1, True), augment, workers) for workers in (0, 2)]
    for a, b in zip(*loaders, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").unlink(), ("latents", "encode")),
        (lambda f: edit(f, version=2), ("version 2", 1)),
        (lambda f: edit(f, statistics=None), "6 of 6"),
        (lambda f: edit(f, count="22"), "count must be int, got '22'"),
        (lambda f: edit(f, checksum=0), ("manifest.json", "damaged")),
        (lambda f: edit(f, classes={"cat": 10, "dog": 12}), "other latents"),
        (lambda f: (f / "labels.safetensors").unlink(), "labels.safetensors"),
        (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda f: (f / SHARD).write_bytes(b"x" * 99999), "safetensors"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(encoded, tmp_path, damage, message):
    folder = copy_set(encoded, tmp_path)
    damage(folder)
    with raises_user_error(message):
        open_set(folder)[list(range(COUNT))]


def read_all(folder, **options):
    stored = open_set(folder, **options)
    every = list(range(COUNT))
    return *stored[every], stored.mirrored(every, torch.ones(COUNT, dtype=torch.bool))[0]


def test_rows_are_not_verified_where_nobody_wants_it(encoded, tmp_path):
    folder = copy_set(encoded, tmp_path)
    shard = folder / "shard-00002-of-00006.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # the moments' last one: safetensors puts them behind int64
    shard.write_bytes(content)
    with raises_user_error("shard-00002-of-00006.safetensors", "row 3"):
        read_all(folder)
    images, _, mirrors = read_all(folder, verify=False)
    assert torch.equal(images, read_all(encoded)[0])
    assert not torch.equal(mirrors, read_all(encoded)[2])


def test_shards_in_one_anothers_places_are_refused(encoded, tmp_path):
    folder = copy_set(encoded, tmp_path)
    first, second = (folder / f"shard-0000{k}-of-00006.safetensors" for k in (0, 1))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    with raises_user_error("shard-00000"):
        read_all(folder)


def test_labels_of_other_latents_are_refused(encoded, tmp_path):
    folder = copy_set(encoded, tmp_path)
    write_labels(folder, 1 - open_set(encoded).labels)  # eleven of each class, too
    with raises_user_error("shard-00000", "labels.safetensors"):
        read_all(folder)


def edit(folder, checksum=None, **values):
    """Change a manifest by hand, as its errors say; `checksum` keeps a wrong one."""
    path = folder / "manifest.json"
    found = json.loads(path.read_text()) | values | {"crc32": checksum}
    path.write_text(json.dumps({key: value for key, value in found.items() if (key, value) != ("crc32", None)}))


def fit(folder, data, max_steps=4, ckpt_path=None):
    losses, task = Losses(), latent_task()
    tiny_trainer(folder, losses, max_steps=max_steps, limit_val_batches=1).fit(task, data, ckpt_path=ckpt_path)
    return losses.values, folder / "checkpoints" / "last.ckpt"


def test_training_draws_the_posterior_and_the_mirror_anew_and_repeats_exactly(encoded, tmp_path):
    data = [Latents(str(encoded), batch_size=11, num_workers=workers) for workers in (0, 1)]
    first, second = (fit(tmp_path / str(i), each) for i, each in enumerate(data))
    assert first[0] == second[0]
    frozen = Latents(str(encoded), batch_size=11, num_workers=0)
    frozen.on_after_batch_transfer = lambda batch, _: batch._replace(images=frozen.network_input(batch.images))
    assert fit(tmp_path / "mean", frozen)[0] != first[0]
    assert fit(tmp_path / "plain", Latents(str(encoded), batch_size=11, num_workers=0, flip=False))[0] != first[0]


def test_a_checkpoint_goes_on_only_with_latents_of_its_own_autoencoder(encoded, image_dir, vae, tmp_path):
    _, checkpoint = fit(tmp_path / "a", Latents(str(encoded), batch_size=11, num_workers=0))
    fit(tmp_path / "b", Latents(str(encoded), batch_size=11, num_workers=0), max_steps=6, ckpt_path=checkpoint)
    other = encode(image_dir, tmp_path / "other", save_tiny_vae(tmp_path / "vae", seed=1))
    with raises_user_error("sha256"):
        fit(tmp_path / "c", Latents(str(other), batch_size=11, num_workers=0), max_steps=6, ckpt_path=checkpoint)


def test_latents_that_do_not_fit_the_config_are_refused_with_both_values(encoded, image_dir, vae, tmp_path):
    with raises_user_error("imagenet-100/cmc"):
        Latents(str(encoded), classes="imagenet-100/cmc", batch_size=11).load()
    larger = encode(image_dir, tmp_path / "larger", vae, "--image-size", "64")
    with raises_user_error("image_size 32", 64):
        Latents(str(encoded), str(larger), batch_size=11).load()
    with raises_user_error("image_size 8", 4):
        fit(tmp_path / "fit", Latents(str(larger), batch_size=11, num_workers=0))
    with raises_user_error("latents"):
        Latents(str(tmp_path / "nothing")).load()


@pytest.mark.parametrize("change", [lambda latents: latents.update(groups=2), lambda latents: latents.pop("scale")])
def test_a_latent_space_of_another_version_is_refused(encoded, tmp_path, change):
    _, path = fit(tmp_path, Latents(str(encoded), batch_size=11, num_workers=0), max_steps=1)
    contents = torch.load(path, weights_only=True)
    change(contents["uvit_decay"]["latents"])
    torch.save(contents, path)
    with raises_user_error("version"):
        load(path)
