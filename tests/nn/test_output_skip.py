"""The learned skip from the input to the output: the plain network at the start, its formula, its records."""

import numpy as np
import pytest
import torch
from conftest import run_script, tiny_net, tiny_task, tiny_trainer
from networks import CONCAT_SIT, SIT, UVIT
from PIL import Image
from refusals import find_line
from torch import nn

from uvit_decay.data import Digits
from uvit_decay.files.instantiate import Spec, build

LEARNED = {"output_skip": "learned"}
FIGURE = "docs/output_skip_figure.py"
KINDS = pytest.mark.parametrize("kind", [UVIT, SIT, CONCAT_SIT], ids=lambda kind: kind.name)


@KINDS
@pytest.mark.parametrize("num_classes", [0, 3])
def test_it_starts_as_the_plain_network_from_any_weights(kind, num_classes):
    torch.manual_seed(0)
    plain = kind.small(num_classes=num_classes)
    torch.manual_seed(0)
    skipped = kind.small(num_classes=num_classes, **LEARNED)
    added = skipped.state_dict().keys() - plain.state_dict().keys()
    assert added == {"output_skip.linear.weight", "output_skip.linear.bias"}
    assert all(torch.equal(skipped.state_dict()[name], value) for name, value in plain.state_dict().items())
    inputs = kind.inputs(num_classes=num_classes)
    official = [kind.loaded(num_classes=num_classes, **options) for options in ({}, LEARNED)]
    outputs = [net(*inputs) for net in official]
    assert torch.equal(*outputs)
    assert outputs[0].std() > 0.01
    nn.init.normal_(skipped.output_skip.linear.weight)
    skipped.load_state_dict(kind.random_state() if num_classes else official[1].state_dict())
    assert not skipped.output_skip.linear.weight.any()


@pytest.mark.parametrize("kind", [UVIT, SIT], ids=lambda kind: kind.name)
def test_it_is_the_formula_and_trains(kind):
    torch.manual_seed(0)
    net = kind.loaded(**LEARNED).double()
    for parameter in net.output_skip.parameters():
        nn.init.normal_(parameter)
    x, t, y = kind.inputs()
    x, t = x.double(), t.double()
    a, b = (net.embed_time(t) @ net.output_skip.linear.weight.T + net.output_skip.linear.bias).T[..., None, None, None]
    expected = a * x + (1 + b) * kind.loaded().double()(x, t, y)
    output = net(x, t, y)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    output.square().mean().backward()
    assert all(parameter.grad.abs().min() > 0 for parameter in net.output_skip.linear.parameters())
    assert torch.equal(net(x, t, y, layers=(1,))[0], output)


def test_a_predicted_variance_is_left_alone():
    torch.manual_seed(0)
    options = {"learn_sigma": True, "learned_variance": True}
    net = SIT.loaded(**options, **LEARNED)
    inputs = SIT.inputs()
    plain = net(*inputs)
    nn.init.constant_(net.output_skip.linear.bias, 2.0)
    output = net(*inputs)
    assert output.shape == (3, 8, 8, 8)
    torch.testing.assert_close(output[:, :4], 2 * inputs[0] + 3 * plain[:, :4])
    assert torch.equal(output[:, 4:], plain[:, 4:])


@pytest.mark.parametrize("kind", [UVIT, SIT], ids=lambda kind: kind.name)
def test_it_is_recorded(kind):
    net, plain = kind.small(**LEARNED), kind.small()
    nn.init.normal_(net.output_skip.linear.weight)
    again = build(Spec.of(type(net), net.config), type(net), "uvit_decay.nn")
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.output_skip.linear.weight, net.output_skip.linear.weight)
    for other, state in ((plain, net), (net, plain)):
        with pytest.raises(RuntimeError, match="output_skip"):
            other.load_state_dict(state.state_dict())


@pytest.mark.parametrize("prediction", ["eps", "x", "velocity"])
def test_its_figure_is_drawn(prediction, tmp_path, monkeypatch):
    task = tiny_task(tiny_net(output_skip="learned"), prediction=prediction)
    tiny_trainer(tmp_path, max_steps=1).fit(task, Digits(32))
    run_script(monkeypatch, tmp_path, FIGURE, "checkpoints/last.ckpt", "skip.png")
    assert np.asarray(Image.open(tmp_path / "skip.png").convert("L")).std() > 10


def test_the_figure_of_a_network_without_it_is_one_line(trained, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_script(monkeypatch, tmp_path, FIGURE, trained, "skip.png")
    find_line(capsys.readouterr().err, "--model.net.output_skip learned")
