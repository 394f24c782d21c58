"""Extraction of features: the same for any batch size and source, and only of what is missing."""

import pytest
import torch
from refusals import raises_user_error
from torch import Tensor

from uvit_decay.encoders.extractors import Extractor, Features
from uvit_decay.evaluation.extract import Extraction, split_into_parts
from uvit_decay.evaluation.image_sources import ImageSource
from uvit_decay.runtime.distributed import Processes
from uvit_decay.terminal.errors import UserError

CPU = torch.device("cpu")


class Numbers(ImageSource):
    """Images whose pixels are their index."""

    name, shape = "numbers", (1, 1, 2)

    def __init__(self, count: int, prefetch: bool, damaged: int | None = None) -> None:
        self.count, self.prefetch, self.damaged, self.reads = count, prefetch, damaged, []

    def __len__(self) -> int:
        return self.count

    def read(self, indices) -> Tensor:
        if self.damaged in indices:
            raise UserError(f"image {self.damaged} is damaged")
        self.reads += list(indices)
        return torch.tensor(indices, dtype=torch.uint8).repeat_interleave(2).view(-1, *self.shape)

    def fingerprint(self) -> dict:
        return {"count": self.count}


class Pixels(Extractor):
    name, widths, channels, sha256 = "pixels", {"features": 2}, 1, "0"

    def prepare(self, images, labels, device) -> None:
        pass

    def extract(self, images) -> Features:
        return Features(images.flatten(1).float())


def extracted(images, folder, batch_size=7, keep=("features", "shown")):
    return Extraction(Pixels(), CPU, batch_size).run(images, keep, Processes(), folder)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_features_are_in_order(tmp_path, prefetch, batch_size):
    images = Numbers(200, prefetch)
    store = extracted(images, tmp_path / "store", batch_size)
    assert images.reads == list(range(200))
    assert torch.equal(store.tensor("features"), torch.arange(200.0)[:, None].expand(-1, 2))
    shown = store.tensor("images")
    assert len(shown) >= 100
    assert torch.equal(shown.flatten(1).float(), store.tensor("features")[: len(shown)])


@pytest.mark.parametrize("prefetch", [False, True])
def test_what_an_error_stopped_goes_on_with_the_part_it_lacks(tmp_path, prefetch):
    with raises_user_error("image 100", "damaged"):
        extracted(Numbers(200, prefetch, damaged=100), tmp_path / "store")
    mended = Numbers(200, prefetch)
    store = extracted(mended, tmp_path / "store")
    (part,) = [part for part in split_into_parts(200) if 100 in part]
    assert mended.reads == list(range(part.start, 200))
    assert store.tensor("features")[:, 0].tolist() == list(range(200))


@pytest.mark.parametrize("count", [1, 2, 23, 24, 25, 1000, 50_000])
def test_parts_are_consecutive_and_small_sets_have_work_for_many_processes(count):
    parts = split_into_parts(count)
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) <= 256
    assert len(parts) >= min(count, 12)


def test_a_store_keeps_the_tensors_that_it_was_made_for(tmp_path):
    extracted(Numbers(50, False), tmp_path / "store", keep=("features",))
    with pytest.raises(UserError, match="store"):  # it has no images
        extracted(Numbers(50, False), tmp_path / "store", keep=("features", "images"))
