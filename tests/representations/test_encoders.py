"""Probes of encoders: clean images, one row, and the pool that was asked for."""

import pytest
import torch
from conftest import tiny_net
from refusals import raises_user_error

from uvit_decay.diffusion.noise_path import VP
from uvit_decay.nn.intermediates import Layer
from uvit_decay.representations.grid import SCORES
from uvit_decay.representations.probe_options import TIMES, Probing
from uvit_decay.representations.probe_protocols import PROTOCOLS, GridProtocol
from uvit_decay.representations.probing import Prober, check_probed, choose_images
from uvit_decay.runtime.distributed import Processes

CPU = torch.device("cpu")


class Encoder(torch.nn.Module):
    """A class token, a register and the four quarters of a digit, scaled by the number of the layer."""

    layers = tuple(Layer(f"blocks.{i}", "encoder") for i in range(3))
    num_prefix_tokens, dim, class_token, num_classes, null_label = 2, 16, True, 10, False
    image_size, channels = 8, 1

    def forward_intermediates(self, x):
        quarters = torch.nn.functional.unfold(x, 4, stride=4).mT
        whole = torch.cat([x.mean(dim=(2, 3), keepdim=True).flatten(1).expand(-1, 16), x[:, 0, 0].repeat(1, 2)], dim=1)
        tokens = torch.cat([whole.unflatten(1, (2, 16)), quarters], dim=1)
        for layer in range(3):
            yield tokens * (layer + 1)


def prober(data, path=None, net=None, **options):
    return Prober(net or Encoder(), path, data, Probing(max_train=200, max_test=100, **options), CPU)


@pytest.mark.parametrize("pool", ["mean", "all", "cls"])
def test_features_of_an_encoder_are_the_pooled_tokens_of_clean_images(digits, pool):
    cells = prober(digits, pool=pool).cells(0)
    train, labels, test = cells.train(0), cells.labels, cells.test
    assert (train.shape, test.shape) == ((3, 200, 16), (3, 100, 16))
    chosen = torch.tensor(choose_images(Probing(max_train=200), digits)[0])
    x = digits.train.images[chosen].double() / 127.5 - 1
    quarters = [x[:, 0, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].flatten(1) for i in (0, 1) for j in (0, 1)]
    cls, register = x.mean(dim=(1, 2, 3))[:, None].expand(-1, 16), x[:, 0, 0].repeat(1, 2)
    tokens = {"mean": quarters, "all": [cls, register, *quarters], "cls": [cls]}[pool]
    expected = torch.stack(tokens).mean(dim=0)
    for layer in range(3):
        torch.testing.assert_close(train[layer].double(), (layer + 1) * expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(labels, digits.train.labels[chosen])


def test_the_grid_of_an_encoder_has_one_row_at_t_0(digits, tmp_path):
    grid = prober(digits, pool="all").grid(Processes())
    assert grid.times == (0.0,)
    assert [scores.shape for scores in grid.scores.values()] == [(1, 3)] * len(SCORES)
    assert grid.scores["test_accuracy"][0, 0] > 0.7
    protocol = grid.protocol
    assert (protocol["times"], protocol["input"], protocol["pool"]) == ([0.0], "clean images", "all")
    assert "label" not in protocol
    assert grid.summary()["t"] == 0.0
    grid.save(tmp_path, "probes", {"weights": "raw"})
    assert [line.split(",")[3] for line in (tmp_path / "probes.csv").read_text().splitlines()] == ["t", *["0.0"] * 3]
    assert (tmp_path / "probes.png").stat().st_size > 1000


def test_denoisers_keep_their_levels_and_an_encoder_is_asked_for_none(digits):
    assert prober(digits, VP(), tiny_net()).times == TIMES
    noise_share = ({"noise_draws": 2}, {"protocol": "noise-share"})
    for options in ({"times": (0.1,)}, {"draws": 2}, {"protocol": "ddae"}, *noise_share):
        with raises_user_error("encoder"):
            check_probed(Encoder(), None, digits, Probing(**options))
    check_probed(Encoder(), None, digits, Probing(pool="cls"))  # classes without a null label do not matter here


def test_an_own_protocol_may_read_all_options_but_not_new_noise_of_an_encoder(digits, monkeypatch):
    fresh = GridProtocol(lambda cells, options: None, ("test_accuracy",), fresh=True)
    monkeypatch.setitem(PROTOCOLS, "own", fresh)
    options = Probing(protocol="own", epochs=7, neighbours=3)
    with raises_user_error("encoder", "protocol own"):
        check_probed(Encoder(), None, digits, options)


def test_what_the_network_does_not_have_is_one_line(digits):
    with raises_user_error("null label"):
        check_probed(tiny_net(null_label=False), VP(), digits, Probing())
    with raises_user_error("UViT", "class token"):
        check_probed(tiny_net(), VP(), digits, Probing(pool="cls"))
    with raises_user_error("blocks.7"):
        check_probed(Encoder(), None, digits, Probing(layers=("blocks.7",)))
