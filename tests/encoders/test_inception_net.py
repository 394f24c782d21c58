"""Weights files of Inception that are missing, damaged or something else; no network is needed, and none used."""

import hashlib
import shutil

import pytest
import torch
from inception_files import prepare, random_weights
from refusals import find_line, raises_user_error

from uvit_decay.encoders import Inception, inception
from uvit_decay.terminal.errors import UserError


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return random_weights(tmp_path_factory.mktemp("inception") / "weights.pth")


@pytest.fixture(scope="module")
def state(weights):
    return torch.load(weights, weights_only=True)


def refused(path=None):
    """Return the one line with which `path` is refused."""
    extractor = Inception(None if path is None else str(path))
    with pytest.raises(UserError) as caught:
        prepare(extractor)
    assert extractor.net is None
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_file_is_a_user_error_at_once(tmp_path):
    for path in (tmp_path / "missing.pth", tmp_path):
        with raises_user_error("Inception", "exist"):
            Inception(str(path))


LAYOUTS = {
    "wrapped": (lambda state: {"state_dict": {"fc.bias": state["fc.bias"]}}, ("state_dict", "Tensor", "dict")),
    "other": (lambda state: {"conv1.weight": torch.zeros(64, 3, 7, 7)}, ("Missing key", '"Conv2d_1a_3x3')),
    "torchvision": (
        lambda state: {**state, "AuxLogits.fc.bias": torch.zeros(1000)},
        ("Unexpected key", '"AuxLogits.fc.bias"'),
    ),
    "list": (lambda state: [1.0], ("dict", "list")),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_file_of_another_layout_is_refused(kind, state, tmp_path):
    change, reason = LAYOUTS[kind]
    path = tmp_path / "weights.pth"
    torch.save(change(state), path)
    find_line(refused(path), "torch-fidelity", path, reason)


def test_counters_of_batches_are_optional_and_half_precision_is_widened(state, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({k: v.half() for k, v in state.items() if not k.endswith("num_batches_tracked")}, path)
    extractor = prepare(Inception(str(path)))
    assert {p.dtype for p in extractor.net.state_dict().values()} == {torch.float32}


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


def test_a_file_that_is_no_state_dict_never_runs(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"fc.weight": Evil()}, path)
    find_line(refused(path), path, "code")


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """Return the path of the file in torch's cache, which is empty; there is no network."""

    def unreachable(*args, **options):
        raise OSError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    return tmp_path / "hub" / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"


def test_without_file_and_network_the_line_tells_where_to_put_it(cached):
    message = refused()
    find_line(message, inception.URL_INCEPTION_V3, "no network", cached, "--inception-weights", "init_args.weights")


def test_a_damaged_file_in_the_cache_is_refused(cached, weights):
    cached.parent.mkdir(parents=True)
    shutil.copy(weights, cached)
    message = refused()
    find_line(message, "Inception", cached, "sha256", "6726825d")


def test_a_file_in_the_cache_is_used_without_the_network(cached, weights, monkeypatch):
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    name = cached.name.replace("6726825d", sha256[:8])
    monkeypatch.setattr(inception, "URL_INCEPTION_V3", f"https://example.org/{name}")
    cached.parent.mkdir(parents=True)
    shutil.copy(weights, cached.with_name(name))
    extractor = prepare(Inception())
    assert extractor.fingerprint() == f"inception-v3-pytorch-fid-{sha256[:12]}"
