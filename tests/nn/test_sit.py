"""SiT in use, as no other network: labels and time, precision and taps."""

import pytest
import torch
from sit_reference import inputs, loaded, small

from uvit_decay.nn.intermediates import HasIntermediates

# ---- labels and time


def test_an_unconditional_network_has_no_labels_and_no_null_label():
    net = loaded(num_classes=0)
    assert (net.num_classes, net.null_label) == (0, False)
    assert not [name for name in net.state_dict() if name.startswith("y_embedder")]
    x, t, _ = inputs()
    assert net(x, t).std() > 0.3


def test_data_is_embedded_as_one_and_noise_as_zero():
    net, seen = loaded(), []
    net.t_embedder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    x, _, y = inputs()
    net(x, torch.tensor([0.0, 0.25, 1.0]), y)
    assert seen[0].tolist() == [1.0, 0.75, 0.0]


def test_dit_embeds_its_levels_exactly_and_other_times_between_them():
    net, seen = loaded(time="dit"), []
    net.t_embedder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    t = torch.arange(1, 1001) / 1000
    net(torch.zeros(1000, 4, 8, 8), t, torch.zeros(1000, dtype=torch.int64))
    assert torch.equal(seen[0], torch.arange(1000.0))
    net(torch.zeros(3, 4, 8, 8), torch.tensor([0.0, 0.0015, 0.9994]), torch.zeros(3, dtype=torch.int64))
    assert seen[1].tolist() == pytest.approx([-1, 0.5, 998.4], abs=1e-4)


def test_a_learned_variance_is_the_second_half_of_the_channels():
    both, first = loaded(learn_sigma=True, learned_variance=True)(*inputs()), loaded(learn_sigma=True)(*inputs())
    assert both.shape == (3, 8, 8, 8)
    assert torch.equal(both[:, :4], first)
    assert both[:, 4:].std() > 0.3


# ---- precision


def test_bfloat16_autocast_leaves_the_embedding_of_time_exact():
    net = loaded()
    times = torch.tensor([0.5, 0.5005])
    exact = net.t_embedder(times)
    with torch.autocast("cpu", torch.bfloat16):
        rough = net.t_embedder(times)
    assert rough.dtype == torch.float32
    assert torch.equal(rough, exact)
    assert not torch.equal(rough[0], rough[1])


# ---- taps


def test_stages_are_the_embeddings_and_every_block_in_execution_order():
    official = [f"blocks.{i}" for i in range(4)]
    decayed = [f"{side}_blocks.{i}" for side in ("enc", "dec") for i in range(2)]
    for wiring, blocks in (("official", official), ("decayed", decayed)):
        net = small(depth=4, wiring=wiring)
        assert [stage.name for stage in net.layers] == ["embeddings", *blocks]
        assert [stage.kind for stage in net.layers] == ["embeddings", *["encoder"] * 2, *["decoder"] * 2]
        assert isinstance(net, HasIntermediates)


@pytest.mark.parametrize(("depth", "kinds"), [(1, ["middle"]), (3, ["encoder", "middle", "decoder"])])
def test_an_odd_depth_has_a_middle_block(depth, kinds):
    assert [stage.kind for stage in small(depth=depth).layers[1:]] == kinds
