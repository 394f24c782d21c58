"""Weights files of Inception that are missing, damaged or something else; no network is needed, and none used."""

import hashlib
import shutil

import pytest
import torch
from inception_files import prepare, random_weights
from refusals import raises_user_error

from uvit_decay.encoders import Inception, inception


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return random_weights(tmp_path_factory.mktemp("inception") / "weights.pth")


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({"conv1.weight": torch.zeros(64, 3, 7, 7)}, ("torch-fidelity", "Missing key", '"Conv2d_1a_3x3')),
        ([1.0], ("torch-fidelity", "dict", "list")),
        ({"fc.weight": Evil()}, "code"),
    ],
)
def test_a_file_of_another_layout_or_with_code_is_refused(contents, reason, tmp_path):
    path = tmp_path / "weights.pth"
    with raises_user_error(path, "exist"):
        prepare(Inception(str(path)))
    torch.save(contents, path)
    with raises_user_error(path, reason):
        prepare(Inception(str(path)))


def test_counters_of_batches_are_optional_and_half_precision_is_widened(weights, tmp_path):
    path = tmp_path / "weights.pth"
    state = torch.load(weights, weights_only=True)
    torch.save({k: v.half() for k, v in state.items() if not k.endswith("num_batches_tracked")}, path)
    extractor = prepare(Inception(str(path)))
    assert {p.dtype for p in extractor.net.state_dict().values()} == {torch.float32}


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """Return the path of the file in torch's cache, which is empty; there is no network."""

    def unreachable(*args, **options):
        raise OSError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    return tmp_path / "hub" / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"


def test_a_file_in_the_cache_is_compared_with_its_checksum_and_used_without_the_network(cached, weights, monkeypatch):
    hints = ("`inception_weights`", "init_args.weights")
    with raises_user_error(inception.URL_INCEPTION_V3, "no network", cached, hints):
        prepare(Inception())
    shutil.copy(weights, cached)
    with raises_user_error("Inception", cached, "sha256", "6726825d"):
        prepare(Inception())
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    name = cached.name.replace("6726825d", sha256[:8])
    monkeypatch.setattr(inception, "URL_INCEPTION_V3", f"https://example.org/{name}")
    shutil.copy(weights, cached.with_name(name))
    extractor = prepare(Inception())
    assert extractor.fingerprint() == f"inception-v3-pytorch-fid-{sha256[:12]}"
