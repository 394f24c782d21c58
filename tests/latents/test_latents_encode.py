"""Encoding of images to latents: what is stored, what is refused, and that it may be interrupted and repeated."""

import io
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import save_tiny_vae
from image_noise import turn
from latent_files import COUNT, SIZE, copy_set, encode, open_set
from PIL import Image
from refusals import find_line, raises_user_error

from uvit_decay.data.decoding import Decoding
from uvit_decay.data.listing import list_images
from uvit_decay.data.reading import read
from uvit_decay.latents import manifest as manifests
from uvit_decay.latents.autoencoder import NO_VARIANCE, Autoencoder
from uvit_decay.latents.encode import describe
from uvit_decay.latents.encode import encode as encode_listing
from uvit_decay.latents.space import LatentSpace
from uvit_decay.runtime.distributed import Processes


def test_what_is_stored_is_what_the_autoencoder_says_of_each_image_and_its_mirror(encoded, image_dir, vae):
    listing, found = list_images(image_dir), Autoencoder(str(vae))
    images, stored = read(listing, Decoding(SIZE, 3)), open_set(encoded)
    every = list(range(COUNT))
    for side, shown in enumerate((images, images.flip(-1))):
        moments, labels = stored.mirrored(every, torch.full((COUNT,), bool(side)))
        assert moments.dtype == torch.float16
        torch.testing.assert_close(moments.float(), found.encode(shown), rtol=2e-3, atol=2e-3)
        assert labels.tolist() == list(listing.labels)


def test_decoding_the_mirrors_latents_gives_the_mirrored_image_and_flipped_latents_do_not(encoded, image_dir, vae):
    found, stored = Autoencoder(str(vae)), open_set(encoded)
    images = read(list_images(image_dir), Decoding(SIZE, 3), [5])
    plain, _ = stored[[5]]
    mirrored, _ = stored.mirrored([5], torch.tensor([True]))
    wanted = found.decode(found.space.mean(found.encode(images.flip(-1)))).int()
    assert (found.decode(found.space.mean(mirrored)).int() - wanted).abs().max() <= 2
    assert (found.decode(found.space.mean(plain.flip(-1))).int() - wanted).abs().max() > 2


def test_the_manifest_says_how_the_latents_were_made(encoded, vae):
    found, space = manifests.read(encoded), Autoencoder(str(vae)).space
    assert replace(found.latents, rgb=None) == space
    assert (found.count, found.image_size, found.size, found.dtype) == (COUNT, SIZE, 4, "float16")
    assert found.classes == {"cat": 11, "dog": 11}
    moments = open_set(encoded)[list(range(COUNT))][0].double()
    mean, variance = 0.18215 * moments[:, :4], 0.18215**2 * moments[:, 4:].exp()
    flat = mean.transpose(0, 1).flatten(1)
    spread = (flat.var(dim=1, correction=0) + variance.transpose(0, 1).flatten(1).mean(dim=1)).sqrt()
    assert found.statistics.mean == pytest.approx(flat.mean(dim=1).tolist(), abs=1e-6)
    assert found.statistics.std == pytest.approx(spread.tolist(), rel=1e-5)


def test_the_linear_map_is_the_least_squares_fit(encoded, image_dir):
    found = manifests.read(encoded)
    x = found.latents.mean(open_set(encoded)[list(range(COUNT))][0])
    images = read(list_images(image_dir), Decoding(SIZE, 3)).float() / 127.5 - 1
    y = torch.nn.functional.avg_pool2d(images, 8).movedim(1, -1).reshape(-1, 3)
    design = torch.cat([x.movedim(1, -1).reshape(-1, 4), torch.ones(len(y), 1)], dim=1)
    fit = torch.linalg.lstsq(design.double(), y.double()).solution
    torch.testing.assert_close(torch.tensor(found.latents.rgb), fit.float(), rtol=1e-3, atol=1e-3)


def test_a_class_list_chooses_the_images_and_an_option_the_precision(image_dir, vae, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dogs.txt").write_text("dog\n")
    for name in ("dogs.txt", "./dogs.txt"):  # the second one finds the latents of the first
        folder = encode(image_dir, tmp_path / "x", vae, "--classes", name, "--dtype", "bfloat16")
        found = manifests.read(folder)
        assert (found.classes, found.class_list) == ({"dog": 11}, name)
    assert open_set(folder)[[0]][0].dtype == torch.bfloat16


def test_a_disk_that_is_too_small_is_found_first(image_dir, vae, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10))
    with raises_user_error("0.0 GiB", "disk"):
        encode(image_dir, tmp_path / "x", vae)


def test_another_autoencoder_or_other_images_are_refused(encoded, image_dir, vae, tmp_path):
    with raises_user_error("sha256"):
        encode(image_dir, encoded, save_tiny_vae(tmp_path / "vae", seed=1))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.png").write_bytes(next(image_dir.rglob("*.png")).read_bytes())
    with raises_user_error("pictures"):
        encode(tmp_path, encoded, vae)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_image_that_cannot_be_read_stops_with_its_name_and_keeps_the_shards_before_it(
    image_dir, vae, tmp_path, workers
):
    folder = shutil.copytree(image_dir, tmp_path / "images")
    damage(folder / "dog" / "21.png")
    with raises_user_error("dog/21.png"):
        encode(folder, tmp_path / "x", vae, "--workers", workers)
    assert len(list((tmp_path / "x").glob("shard-*"))) == 5


def damage(path):
    """Replace an image by a JPEG that is cut short behind its header."""
    content = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(content, "JPEG")
    path.write_bytes(content.getvalue()[:-200])


def test_a_damaged_header_stops_before_the_first_shard_and_damaged_images_are_left_out_on_request(
    image_dir, vae, tmp_path, capsys
):
    folder = shutil.copytree(image_dir, tmp_path / "images")
    (folder / "dog" / "21.png").write_bytes(b"broken")
    damage(folder / "dog" / "19.png")
    with raises_user_error(f"1 of {COUNT}", "dog/21.png", "--skip-unreadable"):
        encode(folder, tmp_path / "x", vae)
    assert not (tmp_path / "x").exists()
    encode(folder, tmp_path / "x", vae, "--skip-unreadable")
    find_line(capsys.readouterr().err, f"{COUNT - 2} pictures", "2 damaged", tmp_path / "x" / "unread.txt")
    listed = (tmp_path / "x" / "unread.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in listed] == ["dog/19.png", "dog/21.png"]
    assert manifests.read(tmp_path / "x").count == COUNT - 2


def test_latents_that_are_not_finite_are_refused(image_dir, vae, tmp_path):
    found = Autoencoder(str(vae))
    found.net.quant_conv.bias.data.fill_(1e6)
    listing = list_images(image_dir)
    settings = {"image_size": 32, "dtype": "float16", "precision": "float32", "batch_size": 3, "shard_size": 4}
    plan = describe(listing, found.space, class_list=None, **settings)
    with raises_user_error("0 to 2", "float16", "`dtype` bfloat16"):
        encode_listing(listing, plan, found, tmp_path / "x", 0, Processes())


@pytest.mark.parametrize("value", [33.3, 100.7, -123.4])
def test_a_constant_channel_has_a_deviation_of_0(value):
    sums = manifests.Sums(LatentSpace("vae", "", scale=1.0, shift=0.0, channels=1, factor=8))
    moments = torch.full((33, 2, 3, 3), value)
    moments[:, 1] = NO_VARIANCE
    sums.update(moments)
    numbers, _ = manifests.statistics([sums])
    assert numbers.mean == pytest.approx([value])
    assert numbers.std == pytest.approx([0.0], abs=1e-5)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards(folder):
    return {name: data for name, data in contents(folder).items() if name.startswith("shard-")}


def test_missing_shards_are_made_again_and_half_written_ones_are_no_obstacle(encoded, image_dir, vae, tmp_path):
    again = encode(image_dir, tmp_path / "again", vae)
    for name in ("shard-00002-of-00006.safetensors", "shard-00005-of-00006.safetensors"):
        (again / name).rename(again / f".{name}.0123abcd.partial")
    replace(manifests.read(again), statistics=None).write(again)  # as it is until the end
    with raises_user_error("4 of 6"):
        manifests.read(again)
    for _ in range(2):  # the second time nothing is missing
        encode(image_dir, again, vae)
        assert contents(again) == contents(encoded)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image-size", "64"], ("image_size 32", 64)),
        (["--dtype", "bfloat16"], ("dtype float16", "bfloat16")),
        (["--shard-size", "5"], ("shard_size 4", 5)),
        (["--batch-size", "4"], ("batch_size 3", 4)),
        (["--image-size", "36"], ("--image-size 36", 8)),
        (["--classes", "imagenet-100/cmc"], "100 of the 100"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_nothing_is_lost(encoded, image_dir, vae, flags, message):
    before = contents(encoded)
    with raises_user_error(message):
        encode(image_dir, encoded, vae, *flags)
    assert contents(encoded) == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.with_name("shard-00002-of-00006.safetensors").read_bytes()),
        lambda path: flip(path),
    ],
)
def test_a_damaged_shard_is_made_anew_with_a_remark(encoded, image_dir, vae, tmp_path, damage, capsys):
    folder = copy_set(encoded, tmp_path)
    damage(folder / "shard-00001-of-00006.safetensors")
    encode(image_dir, folder, vae)
    said = [line for line in capsys.readouterr().err.splitlines() if "encoded again" in line]
    assert len(said) == 1
    assert "shard-00001-of-00006.safetensors" in said[0]
    assert contents(folder) == contents(encoded)


def flip(path):
    """Flip a bit of the last value, which is one of the moments."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))


def test_an_image_that_has_changed_is_refused_before_others_join_its_shard(encoded, image_dir, vae, tmp_path):
    """Even with equal sizes in bytes and equal times of change: the pixels are compared."""
    folder, images = copy_set(encoded, tmp_path / "latents"), shutil.copytree(image_dir, tmp_path / "images")
    changed = sorted(images.rglob("*.png"))[6]  # third in the second shard
    turn(changed)
    encode(images, folder, vae)  # nothing is added: the latents are those of the images that were
    assert shards(folder) == shards(encoded)
    (folder / "shard-00005-of-00006.safetensors").unlink()
    before = contents(folder)
    with raises_user_error(changed.name, "shard-00001"):
        encode(images, folder, vae)
    assert contents(folder) == before
    shutil.copy2(image_dir / changed.relative_to(images), changed)
    encode(images, folder, vae)
    assert shards(folder) == shards(encoded)
