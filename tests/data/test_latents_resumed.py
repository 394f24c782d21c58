"""Encoding that was interrupted, or is repeated: the same bytes, and no shard of other images."""

import shutil
from dataclasses import replace

import pytest
import torch
from image_noise import turn
from latent_files import copied, encode, without_checksums
from safetensors.torch import save

from uvit_decay.data.latents import manifest as manifests
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.tensor_files import load_tensors


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards(folder):
    return {name: data for name, data in contents(folder).items() if name.startswith("shard-")}


def test_encoding_again_changes_nothing(encoded, image_dir, vae):
    before = contents(encoded)
    encode(image_dir, encoded, vae)
    assert contents(encoded) == before


def test_missing_shards_are_made_again_and_half_written_ones_are_no_obstacle(encoded, image_dir, vae, tmp_path):
    again = encode(image_dir, tmp_path / "again", vae)
    for name in ("shard-00002-of-00006.safetensors", "shard-00005-of-00006.safetensors"):
        (again / name).rename(again / f".{name}.0123abcd.partial")
    replace(manifests.read(again), statistics=None).write(again)  # as it is until the end
    with pytest.raises(UserError, match="4 of 6 shards are encoded; run the same encode command again"):
        manifests.read(again)
    encode(image_dir, again, vae)
    assert contents(again) == contents(encoded)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image-size", "64"], "was encoded with image_size 32, not 64"),
        (["--dtype", "bfloat16"], "was encoded with dtype float16, not bfloat16"),
        (["--shard-size", "5"], "was encoded with shard_size 4, not 5"),
        (["--batch-size", "4"], "was encoded with batch_size 3, not 4"),
        (["--image-size", "36"], "--image-size 36 is not a multiple of 8"),
        (["--shard-size", "0"], "must be at least 1"),
        (["--workers", "-1"], "--workers must be at least 0"),
        (["--classes", "imagenet-100/cmc"], "no images of 100 of the 100 classes"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_nothing_is_lost(encoded, image_dir, vae, flags, message):
    before = contents(encoded)
    with pytest.raises(UserError, match=message):
        encode(image_dir, encoded, vae, *flags)
    assert contents(encoded) == before


def test_shards_that_nobody_accounts_for_are_refused(encoded, image_dir, vae, tmp_path):
    folder = copied(encoded, tmp_path)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds shards but no manifest.json"):
        encode(image_dir, folder, vae)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"x" * 99),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.with_name("shard-00002-of-00006.safetensors").read_bytes()),
        *(lambda path, name=name: flip(path, name) for name in ("moments", "pixels")),
    ],
)
def test_a_damaged_shard_is_made_anew_with_a_remark(encoded, image_dir, vae, tmp_path, damage, capsys):
    folder = copied(encoded, tmp_path)
    damage(folder / "shard-00001-of-00006.safetensors")
    encode(image_dir, folder, vae)
    said = [line for line in capsys.readouterr().err.splitlines() if "made anew" in line]
    assert len(said) == 1
    assert "shard-00001-of-00006.safetensors" in said[0]
    assert contents(folder) == contents(encoded)


def flip(path, name):
    """Another bit in a tensor."""
    content, tensor = path.read_bytes(), load_tensors(path)[1][name].contiguous().view(torch.uint8).numpy().tobytes()
    place = content.index(tensor)
    path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, metadata: tensors["moments"][1, 0, 0, 0].fill_(torch.inf),
        lambda tensors, metadata: tensors.update(moments=tensors["moments"].float()),
        lambda tensors, metadata: tensors.update(moments=tensors["moments"][:3].clone()),
        lambda tensors, metadata: tensors.update(more=torch.zeros(1)),
        lambda tensors, metadata: metadata.clear(),
        lambda tensors, metadata: metadata.update(sums=metadata["sums"].replace("0.", "NaN, 0.", 1)),
    ],
)
def test_a_wrong_shard_without_checksums_is_made_anew(encoded, image_dir, vae, tmp_path, damage, capsys):
    folder = without_checksums(copied(encoded, tmp_path))
    path = folder / "shard-00001-of-00006.safetensors"
    metadata, tensors = load_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    damage(tensors, metadata)
    path.write_bytes(save(tensors, metadata or None))
    encode(image_dir, folder, vae)
    assert capsys.readouterr().err.count("made anew") == 1
    assert contents(folder)[path.name] == contents(encoded)[path.name]


def test_other_images_of_the_same_names_are_refused_and_nothing_is_lost(encoded, image_dir, vae, tmp_path):
    """Also of the same sizes in bytes, and times of change: the pixels tell."""
    folder, others = copied(encoded, tmp_path / "latents"), shutil.copytree(image_dir, tmp_path / "others")
    (folder / "shard-00005-of-00006.safetensors").unlink()
    for path in others.rglob("*.png"):
        turn(path)
    before = contents(folder)
    with pytest.raises(UserError, match="others: cat/.*png is another image than .*shard-00000.* was made of"):
        encode(others, folder, vae)
    assert contents(folder) == before


def test_an_image_that_has_changed_is_refused_before_others_join_its_shard(encoded, image_dir, vae, tmp_path, capsys):
    folder, images = copied(encoded, tmp_path / "latents"), shutil.copytree(image_dir, tmp_path / "images")
    changed = sorted(images.rglob("*.png"))[6]  # third in the second shard
    turn(changed)
    encode(images, folder, vae)  # nothing is added: the latents are those of the images that were
    assert shards(folder) == shards(encoded)
    (folder / "shard-00005-of-00006.safetensors").unlink()
    before = contents(folder)
    with pytest.raises(UserError, match=f"{changed.name} is another image than .*shard-00001.* was made of"):
        encode(images, folder, vae)
    assert contents(folder) == before
    shutil.copy2(image_dir / changed.relative_to(images), changed)
    encode(images, folder, vae)
    assert shards(folder) == shards(encoded)
    assert "comparing shards with their images" in capsys.readouterr().err
