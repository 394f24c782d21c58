"""Randomly cropped images: torchvision's pixels, the same ones for any division of the batches and when resumed."""

import numpy as np
import pytest
import torch
import yaml
from conftest import tiny_trainer
from image_noise import noise, tree, write_zip
from lightning.pytorch import LightningModule
from PIL import Image
from refusals import raises_user_error
from torch import nn
from torchvision.transforms import InterpolationMode, functional

from uvit_decay.data import Augment, AugmentedImages
from uvit_decay.data.augmented import Cached, Streamed
from uvit_decay.data.batches import InMemory, StepLoader, StepSampler
from uvit_decay.data.decoding import Box, Decoding, decode_box
from uvit_decay.data.named import open_data
from uvit_decay.evaluation.image_sources import DatasetImages

RAND = "rand-m9-mstd0.5-inc1"


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Return two classes of twelve JPEGs of various sizes."""
    folder = tmp_path_factory.mktemp("photographs")
    for i in range(24):
        path = folder / ("cat", "dog")[i % 2] / f"{i:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        smooth = Image.fromarray(noise(6, 5, 3, seed=i)).resize((60 + 3 * i, 100 - 2 * i), Image.Resampling.BICUBIC)
        smooth.save(path, quality=90)
    return folder


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """Return two classes of twelve 16x16 PNGs, zipped."""
    folder = tmp_path_factory.mktemp("squares")
    names = [f"{('cat', 'dog')[i % 2]}/{i:02d}.png" for i in range(24)]
    return write_zip(tree(folder / "tree", names, size=16), folder / "squares.zip")


def ready(path, image_size=16, **options):
    data = AugmentedImages(str(path), image_size=image_size, batch_size=8, **{"num_workers": 0, **options})
    data.setup()
    return data


def batches(data, rank=0, ranks=1, limit=None, start=0, workers=0, epochs=2):
    sampler = StepSampler(len(data.train), 8, data.seed, rank, ranks, True, limit)
    loader = StepLoader(data.train, sampler, data.augmentation(), workers)
    loader.load_state_dict({"start": start})
    return [batch for _ in range(epochs) for batch in loader]


def opened(data, i):
    with Image.open(data.train.listing.path / data.train.listing.members[i]) as image:
        return image.convert("RGB")


@pytest.mark.parametrize("box", [Box(0, 0, 100, 60), Box(10, 3, 31, 50), Box(20, 5, 9, 4)])
def test_a_part_has_torchvisions_pixels(photographs, box):
    path = photographs / "cat" / "00.jpg"
    found = decode_box(path.open("rb"), "00.jpg", Decoding(48, 3), lambda height, width: box)
    with Image.open(path) as image:
        expected = functional.resized_crop(image, *box, [48, 48], InterpolationMode.BICUBIC)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize(("size", "scale"), [(201, 1), (200, 2), (101, 2), (100, 4), (50, 8), (20, 8)])
def test_large_jpegs_are_decoded_smaller_but_not_below_the_part(tmp_path, size, scale):
    smooth = Image.fromarray(noise(6, 5, 3)).resize((803, 601), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.jpg", quality=95)
    box, decoded, crop = Box(101, 55, 400, 555), [], Image.Image.crop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "crop", lambda image, part: decoded.append(image.size) or crop(image, part))
        found = decode_box((tmp_path / "a.jpg").open("rb"), "a.jpg", Decoding(size, 3), lambda height, width: box)
    assert decoded == [(-(-803 // scale), -(-601 // scale))]
    with Image.open(tmp_path / "a.jpg") as image:
        expected = functional.resized_crop(image, *box, [size, size], InterpolationMode.BICUBIC)
    assert np.abs(np.asarray(found).astype(int) - np.asarray(expected)).mean() < 1.0


def test_streamed_batches_are_torchvisions_crops_mirrored_as_drawn(photographs):
    data = ready(photographs)
    assert isinstance(data.train, Streamed)
    rows = torch.arange(5)
    images, labels = data.augmentation()(data.train, [3, 7, 11, 15, 20], rows)
    draws = data.augment.draws(data.seed, rows)
    for image, label, i, draw in zip(images, labels, [3, 7, 11, 15, 20], draws, strict=True):
        picture = opened(data, i)
        box = draw.box(picture.height, picture.width)
        expected = functional.resized_crop(picture, *box, [16, 16], InterpolationMode.BICUBIC)
        expected = functional.hflip(expected) if draw.mirror else expected
        off = np.abs(image.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected))
        assert off.mean() < 3.0  # draft mode
        assert label == data.train.labels[i]


def test_squares_of_one_size_are_cached_and_others_streamed(squares, photographs):
    assert isinstance(ready(squares).train, Cached)
    assert isinstance(ready(squares, image_size=8).train, Cached)
    assert isinstance(ready(squares, memory_gb=0.0).train, Streamed)
    assert isinstance(ready(squares, augment=Augment(rand_augment=RAND)).train, Streamed)
    assert isinstance(ready(photographs).train, Streamed)


def test_cached_and_streamed_images_are_the_same_crops(squares):
    augment = Augment(shift=3)
    cached, streamed = ready(squares, augment=augment), ready(squares, augment=augment, memory_gb=0.0)
    for a, b in zip(batches(cached), batches(streamed), strict=True):
        assert torch.equal(a.labels, b.labels)
        off = (a.images.int() - b.images.int()).abs()
        assert off.max() <= 2
        assert (off > 0).float().mean() < 0.02


@pytest.mark.parametrize(("source", "rand"), [("photographs", RAND), ("squares", None)])
def test_crops_do_not_depend_on_processes_pieces_workers_or_resumption(request, source, rand):
    data = ready(request.getfixturevalue(source), augment=Augment(rand_augment=rand))
    whole = batches(data)
    assert not torch.equal(whole[0].images, whole[3].images)
    shares = [batches(data, rank, 2, limit=2) for rank in range(2)]
    for number, batch in enumerate(whole):
        parts = [part for share in shares for part in share if part.number == number]
        assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
    for other in (batches(data, workers=2, start=2, epochs=1), batches(data, start=2, epochs=1)):
        assert len(other) == 1
        assert torch.equal(other[0].images, whole[2].images)


@pytest.mark.parametrize(("size", "share"), [(16, 1.0), (12, 0.8), (30, 0.875)])
def test_images_read_by_index_and_test_images_have_torchvisions_test_crop(photographs, squares, size, share):
    for path in (photographs, squares):
        data = ready(path, size, test_crop=share, test_path=str(path))
        assert isinstance(data.test, InMemory)
        chosen = [2, 9, 17]
        images, _ = data.train[chosen]
        assert (images.int() - data.test[chosen][0].int()).abs().max() <= 2
        if path is photographs:
            for image, i in zip(images, chosen, strict=True):
                scaled = functional.resize(opened(data, i), [round(size / share)], InterpolationMode.BICUBIC)
                expected = np.asarray(functional.center_crop(scaled, [size, size]))
                np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), expected)


class Seen(LightningModule):
    """Remembers the images that a task gets."""

    def __init__(self):
        super().__init__()
        self.weight, self.training_images, self.test_images = nn.Parameter(torch.zeros(())), [], []

    def training_step(self, batch, index):
        self.training_images.append(batch.images)
        return self.weight

    def validation_step(self, batch, index):
        self.test_images.append(batch.images)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_training_images_are_erased_after_the_transfer_and_test_images_are_not(squares, tmp_path):
    options = {"test_path": str(squares), "test_crop": 1.0}
    seen, plain = Seen(), Seen()
    for module, erase in ((seen, 1.0), (plain, 0.0)):
        data = ready(squares, augment=Augment(erase=erase), **options)
        tiny_trainer(tmp_path, max_steps=2, limit_val_batches=1, val_check_interval=1).fit(module, data)
    assert torch.equal(seen.test_images[0], plain.test_images[0])
    differs = (torch.stack(seen.training_images) != torch.stack(plain.training_images)).any(2)
    assert differs.flatten(2).any(2).all()
    assert differs.float().mean() < 0.4


def test_pieces_of_a_batch_are_erased_as_the_whole(photographs, tmp_path):
    images = []
    for piece in (None, 2):
        seen, data = Seen(), ready(photographs, augment=Augment(erase=0.5), device_batch_size=piece)
        tiny_trainer(tmp_path, max_steps=2).fit(seen, data)
        images.append(torch.cat(seen.training_images))
    assert torch.equal(*images)


def test_a_run_resumed_in_the_middle_of_an_epoch_sees_the_crops_of_one_that_was_not_interrupted(photographs, tmp_path):
    def run(steps, resume=None):
        seen, data = Seen(), ready(photographs, augment=Augment(rand_augment=RAND, erase=0.5))
        trainer = tiny_trainer(tmp_path, max_steps=steps)
        trainer.fit(seen, data, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return seen.training_images

    run(4)  # of 3 an epoch
    assert torch.equal(torch.stack(run(7)[4:]), torch.stack(run(7, tmp_path / "4.ckpt")))


def test_a_configuration_names_it_and_stored_results_know_its_crop(photographs, squares, tmp_path):
    prints = []
    for path in (photographs, squares):
        for share in (1.0, 0.5):
            options = {
                "path": str(path),
                "image_size": 8,
                "batch_size": 8,
                "test_crop": share,
                "augment": {"crop_scale": [0.5, 1.0]},
            }
            values = {"data": {"class_path": "uvit_decay.data.AugmentedImages", "init_args": options}}
            (tmp_path / "data.yaml").write_text(yaml.safe_dump(values))
            data = open_data(str(tmp_path / "data.yaml"), None, 8, 3)
            assert data.augment == Augment(crop_scale=(0.5, 1.0))
            prints.append(str(DatasetImages("x", data.train, 3, data.class_names).fingerprint()))
    assert len(set(prints)) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named_in_one_line_while_training(photographs, tmp_path, workers):
    content = (photographs / "cat" / "00.jpg").read_bytes()
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(content[: 300 if i == 5 else len(content)])
    with raises_user_error("5.jpg"):
        batches(ready(tmp_path), workers=workers)
