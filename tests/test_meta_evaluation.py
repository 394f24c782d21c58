"""Evaluation on a GPU, for which the meta device stands: where it waits for it, exactly (docs/performance.md)."""

from collections import Counter
from pathlib import Path

import inception_files
import pytest
import torch
from conftest import tiny_net
from dinov2_files import random_weights
from record_ops import Waits
from small_mae import small_mae

from uvit_decay.data.augment import Augment, erase_boxes
from uvit_decay.data.augmented import Cached
from uvit_decay.data.decoding import ResizedCentre
from uvit_decay.diffusion.likelihood import log_likelihood
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.diffusion.sampling import DiffusionModel
from uvit_decay.encoders import DINOv2, Inception, inception
from uvit_decay.encoders.networks import ProbedNetwork
from uvit_decay.encoders.resize import RESIZE
from uvit_decay.representations.classification import Classifying
from uvit_decay.representations.noise import measure_noise_share
from uvit_decay.representations.probe_options import Classification, Probing
from uvit_decay.representations.probing import Prober
from uvit_decay.runtime.distributed import Processes

META = torch.device("meta")
TO_HOST, TO_DEVICE = "copies to the host", "copies to the device"


def there(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


def waits_of(call):
    """Return the number of waits of the call, by the files' names, and its result."""
    with Waits() as waits:
        result = call()
    return Counter(place.rpartition("/")[2] for place in waits.found), result


@pytest.fixture(scope="module")
def net():
    return tiny_net().to(META).eval()


def test_features_of_probes_wait_once_a_batch(digits, net):
    probing = Probing(times=(0.1,), max_train=32, max_test=16, batch_size=16, neighbours=5)
    prober, cells = Prober(net, VP(), digits, probing, META), len(net.layers)
    features, train = waits_of(lambda: prober.cells(0).train(0))
    assert (train.device.type, train.shape) == ("cpu", (cells, 32, net.dim))
    assert features == {f"features.py work: {TO_HOST}": 3}


def test_a_noise_share_waits_once_a_level(digits, net):
    probing = Probing(protocol="noise-share", times=(0.1, 0.3), noise_images=32, batch_size=16)
    found, _ = waits_of(lambda: measure_noise_share(net, VP(), digits, probing, META, "float32", Processes()))
    assert found == {f"noise.py work: {TO_HOST}": 2}


def test_features_of_protocols_wait_once_a_batch(digits):
    encoder = small_mae().to(META).eval()
    sizes = {"batch_size": 16, "max_train": 32, "max_test": 16, "neighbours": 5}
    options = Classification(protocol=("logistic", "knn"), layer="2", **sizes)
    prober = Classifying(ProbedNetwork(encoder, "mae", "mae", {}), digits, options).prober(META, "float32")
    found, cells = waits_of(lambda: prober.stored_cells(["all", "mean"], Processes()))
    assert (cells["all"].train(0).device, cells["mean"].test.shape) == (META, (1, 16, 16))
    assert found.pop(f"features.py work: {TO_HOST}") == 3
    assert found == {f"probing.py stored_cells: {TO_DEVICE}": 4}


def test_likelihoods_never_wait(net):
    model = DiffusionModel.from_net(net, VP(), "eps", META)
    found, density = waits_of(lambda: log_likelihood(model, there(3, 1, 8, 8), [0, 1, 2], [4, 5, 6], steps=3))
    assert (density.device, density.shape, found) == (META, (3,), {})


@pytest.mark.parametrize("protocol", RESIZE)
def test_features_of_inception_never_wait(protocol, monkeypatch):
    monkeypatch.setattr(inception, "load_weights", lambda *file: inception_files.layout())
    extractor = Inception(protocol=protocol, spatial=True)
    extractor.net = inception.InceptionV3(Path(), protocol, spatial=True).to(META)
    extractor.net.place(META)
    found, features = waits_of(lambda: extractor(there(2, 1, 32, 32, dtype=torch.uint8)))
    assert [(part.device, part.shape[1]) for part in features] == [(META, 2048), (META, 1008), (META, 2023)]
    assert found == {}


def test_features_of_dinov2_never_wait(tmp_path):
    extractor = DINOv2(str(random_weights(tmp_path / "dinov2.pth")))
    extractor.prepare(there(0, 3, 8, 8, dtype=torch.uint8), there(0, dtype=torch.int64), META)
    found, features = waits_of(lambda: extractor(there(2, 1, 32, 32, dtype=torch.uint8)))
    assert (features.features.device, features.features.shape, found) == (META, (2, 128), {})


def test_crops_and_erased_rectangles_never_wait():
    images = Cached(there(9, 3, 16, 16, dtype=torch.uint8), torch.arange(9), 12, ResizedCentre(0.875))
    rows = torch.arange(4)
    draws = Augment().draws(0, rows)
    for crop in (lambda: images.augment([1, 2, 3, 4], draws)[0], lambda: images[[5, 6, 7, 8]][0]):
        found, crops = waits_of(crop)
        assert (crops.device, crops.shape, found) == (META, (4, 3, 12, 12), {})
    assert waits_of(lambda: erase_boxes(there(4, 3, 12, 12), 1.0, 0, rows))[0] == {}
