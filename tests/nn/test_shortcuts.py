"""The table of shortcuts: every entry against its formula, in our networks and attached, learned and recorded."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_models import MODELS
from jsonargparse import ArgumentParser
from mae_reference import SMALL as SMALL_MAE
from networks import SIT, UVIT
from refusals import raises_user_error
from torch import nn

from uvit_decay import decay
from uvit_decay.decay import SHORTCUTS, Plan, shortcuts
from uvit_decay.decay.schedule import read_weights
from uvit_decay.files.instantiate import Spec, build
from uvit_decay.nn import MAE, ResNet, ViT
from uvit_decay.nn.block import AdaLNBlock, Block
from uvit_decay.terminal.errors import UserError

N, A = 6, 0.7
LINEAR = [1 - 0.3 * k / (N - 1) for k in range(N)]
ROOT_HALF, MP = math.sqrt(0.5), math.hypot(0.7, 0.3)
# alpha, beta and scale of branch k of N, written again from the papers
FORMULAS = {
    "linear": lambda k: (LINEAR[k], 1, 1),
    "cosine": lambda k: (A + (1 - A) * (1 + math.cos(math.pi * k / (N - 1))) / 2, 1, 1),
    "learnable": lambda k: (LINEAR[k], 1, 1),
    "constant": lambda k: (ROOT_HALF, ROOT_HALF, 1),
    "constant-branch": lambda k: (1, ROOT_HALF, 1),
    "gain": lambda k: (1, 1 / math.prod(LINEAR[: k + 1]), 1),
    "mp_sum": lambda k: (0.7 / MP, 0.3 / MP, 1),
    "depth_scaled": lambda k: (1, 1, 1 / math.sqrt(1 + k // 2)),
    "layerscale": lambda k: (1, 0.1, 1),
    "rezero": lambda k: (1, 0, 1),
}
LEARNED = {"learnable": "alphas", "layerscale": "betas", "rezero": "betas"}


def options(name):
    return {"schedule": name, "alpha_min": A if SHORTCUTS[name].falls else 1.0}


each_entry = pytest.mark.parametrize("name", [name for name, kind in SHORTCUTS.items() if kind.numbers])


@each_entry
def test_every_entry_has_the_weights_of_its_formula(name):
    given = shortcuts(3, **options(name))
    for k, (alpha, beta, scale) in enumerate(zip(given.alphas, given.betas, given.scales, strict=True)):
        assert (alpha, beta, scale) == pytest.approx(FORMULAS[name](k), rel=1e-12)
    assert given.learned == LEARNED.get(name)


@pytest.mark.parametrize(("blocks", "initial"), [(18, 1e-1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layerscale_starts_smaller_in_deeper_networks(blocks, initial):
    assert set(shortcuts(blocks, 1.0, "layerscale").betas) == {initial}


def by_hand(block, x, weights, c):
    """Return the branches of a block of either kind, with the weights of its two branches, in plain operations."""
    shift, scale, gate = (0.0, 0.0), (0.0, 0.0), (1.0, 1.0)
    if c is not None:
        (*shift_scale_gate,) = block.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        shift, scale, gate = shift_scale_gate[::3], shift_scale_gate[1::3], shift_scale_gate[2::3]
    for i, (norm, branch) in enumerate([(block.norm1, block.attn), (block.norm2, block.mlp)]):
        alpha, beta, factor = weights[i]
        x = alpha * x + beta * gate[i] * branch(factor * norm(x) * (1 + scale[i]) + shift[i])
    return x


@each_entry
@pytest.mark.parametrize("kind", [UVIT, SIT], ids=lambda kind: kind.name)
def test_blocks_of_our_networks_compute_the_formula_and_learned_weights_get_gradients(name, kind):
    torch.manual_seed(0)
    net = kind.small(**options(name)).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, t, y = kind.inputs()
    seen = []
    for block in net.modules():
        if isinstance(block, Block | AdaLNBlock):
            block.register_forward_hook(lambda *call: seen.append(call), with_kwargs=True)
    net(x.double(), t.double(), y).square().mean().backward()
    weights = [connection.weights() for connection in net.connections]
    for i, (block, (tokens, *rest), given, out) in enumerate(seen):
        if getattr(block, "skip_linear", None) is not None:
            tokens = block.skip_linear(torch.cat([tokens, given["skip"]], dim=-1))
        c = rest[0] if isinstance(block, AdaLNBlock) else None
        torch.testing.assert_close(out, by_hand(block, tokens, weights[2 * i : 2 * i + 2], c), rtol=1e-9, atol=1e-9)
    assert len(seen) == kind.blocks
    if name in LEARNED:
        assert getattr(net, LEARNED[name]).grad.abs().min() > 0


def test_a_copy_of_a_block_with_fixed_shortcuts_is_the_block_alone():
    net = UVIT.small(alpha_min=0.7)
    assert len(pickle.dumps(net.mid_block)) < len(pickle.dumps(net)) / 2


@each_entry
def test_attach_takes_every_entry(name):
    torch.manual_seed(0)
    case = MODELS["torch"]()
    case.to(torch.float64)
    dim = case.model.layers[0].norm1.normalized_shape[0] if name == "layerscale" else None
    attached = decay.attach(case.model, **options(name), dim=dim).double()
    weights = [attached.weights(k) for k in range(len(attached.shortcuts.alphas))]
    alphas, betas, scales = zip(*weights, strict=True)
    edited = case.edited(alphas, betas, scales=scales)
    out = case()
    torch.testing.assert_close(out, edited, rtol=1e-6, atol=1e-6)
    if name in LEARNED:
        out.square().mean().backward()
        assert getattr(attached, LEARNED[name]).grad.abs().min() > 0
    attached.remove()


def test_attach_needs_the_width_for_channels_and_norms_of_their_own_for_scales():
    with raises_user_error("dim"):
        decay.attach(MODELS["torch"]().model, 1.0, "layerscale")
    with raises_user_error("depth_scaled"):
        decay.attach(MODELS["diffusers"]().model, 1.0, "depth_scaled")


@each_entry
@pytest.mark.parametrize("build", [UVIT.small, SIT.small, lambda **o: ViT(16, 4, 3, 16, 4, 2, zero_init=True, **o)])
def test_state_dicts_record_the_entry_and_refuse_another(name, build):
    net, plain = build(**options(name)), build()
    build(**options(name)).load_state_dict(net.state_dict())
    official = {key: value for key, value in net.state_dict().items() if key not in ("alphas", "betas", "scales")}
    build(**options(name)).load_state_dict(official)
    assert list(official) == [key for key in plain.state_dict() if key != "alphas"]
    with pytest.raises((UserError, RuntimeError), match="alphas|betas|scales"):
        plain.load_state_dict(net.state_dict())
    another = build(**options("mp_sum" if name != "mp_sum" else "constant"))
    with pytest.raises((UserError, RuntimeError), match="alphas|betas|scales"):
        another.load_state_dict(net.state_dict())


@each_entry
@pytest.mark.parametrize("wiring", ["official", "decayed"])
def test_branches_of_every_entry_learn_when_they_start_at_zero(name, wiring):
    """With betas of 0 and last layers of 0, no gradient would ever reach either."""
    torch.manual_seed(0)
    mae = MAE(**SMALL_MAE, wiring=wiring, zero_init=True, **options(name))
    x = torch.randn(2, 3, mae.image_size, mae.image_size)
    rows = list(mae.forward_intermediates(x))
    (rows[-1] - rows[0]).square().mean().add(rows[-1].sum()).backward()
    last = [block.mlp.fc2.weight.grad for block in mae.blocks]
    assert name == "rezero" or all(grad.abs().max() > 0 for grad in last)
    assert name != "rezero" or mae.betas.grad.abs().min() > 0


def test_a_resnet_takes_the_entries_that_do_not_count_blocks_of_two():
    for name, kind in SHORTCUTS.items():
        if kind.blocks or not kind.numbers:
            with raises_user_error("ResNet"):
                ResNet(32, width=8, stem="cifar", **options(name))
        else:
            net = ResNet(16, width=8, stem="cifar", num_classes=2, **options(name))
            net(torch.randn(4, 3, 16, 16)).square().sum().backward()
            assert name not in LEARNED or getattr(net, LEARNED[name]).grad.abs().max() > 0


def falling(count):
    """Return a schedule of one's own."""
    return [(1.0 - k / 10, 1.0 + k) for k in range(count)]


def test_lists_and_functions_of_ones_own_are_recorded_as_numbers():
    net = ViT(16, 4, 3, 16, 2, 2, schedule=falling)
    assert net.shortcuts.alphas == (1.0, 0.9, 0.8, 0.7)
    assert net.config["schedule"] == [[1.0, 1.0], [0.9, 2.0], [0.8, 3.0], [0.7, 4.0]]
    again = build(Spec.of(ViT, net.config), ViT, "uvit_decay.nn")  # as a checkpoint does, which holds plain values
    again.load_state_dict(net.state_dict())
    assert again.config == net.config
    assert ViT(16, 4, 3, 16, 2, 2, schedule=[1.0, 0.9, 0.8, 0.7]).shortcuts == decay.weighted([1.0, 0.9, 0.8, 0.7])


@pytest.mark.parametrize(
    "numbers",
    [
        [1.0, 0.9],
        [1.0, 0.9, 0.8, math.nan],
        [[1.0, 1.0, 1.0]] * 4,
        [1e39] * 4,
        [1.0, 1.0, 1.0, 1e308],
        [10**400] * 4,
        [10**5000] * 4,
        [[0.9, 1e308]] * 4,
        [1e20] * 4,
        [1e30, 1e30, 1e-30, 1e-30],
        [None] * 4,
        [1, 0.5, (1.0, 2.0), [0.5, 1]],
        ["1"] * 4,
        b"1111",
        [[]] * 4,
        None,
        0.9,
        torch.tensor(0.9),
        torch.ones(4, 3),
    ],
)
def test_a_list_that_does_not_fit_is_one_line(numbers):
    with raises_user_error(4):
        read_weights(numbers, 4)


@pytest.mark.parametrize(
    "numbers",
    [
        [(1, 1), [0.5, 1], (1.0, 2.0), [0.5, 1]],
        torch.tensor([[1, 1], [0.5, 1], [1, 2], [0.5, 1]]),
        np.array([[1, 1], [0.5, 1], [1, 2], [0.5, 1]]),
    ],
)
def test_a_list_may_hold_pairs_or_be_a_tensor(numbers):
    assert read_weights(numbers, 4) == decay.weighted([1.0, 0.5, 1.0, 0.5], [1.0, 1.0, 2.0, 1.0])


def test_flags_take_lists_of_alphas_and_pairs():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--schedule", type=decay.Schedule)
    given = parser.parse_args(["--schedule", "[[1, 1], [1, 1], [0.5, 1], [0.5, 2]]"]).schedule
    assert read_weights(given, 4) == decay.weighted([1.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, 2.0])
    assert parser.parse_args(["--schedule", "[1, 0.5]"]).schedule == [1.0, 0.5]
    assert parser.parse_args(["--schedule", "cosine"]).schedule == "cosine"


def test_gains_beyond_float32_are_refused():
    with raises_user_error("float32", "alpha_min"):
        shortcuts(1000, 1e-3, "gain")
    with raises_user_error("float32", "rate_over_gain"):
        _ = shortcuts(1000, 1e-3).gains


def test_what_does_not_fall_refuses_alpha_min_and_one_kind_of_branches():
    for schedule in (*(name for name, kind in SHORTCUTS.items() if not kind.falls), [1.0] * 4, falling):
        with raises_user_error("alpha_min"):
            shortcuts(2, 0.7, schedule)
    for schedule in ("learnable", *(name for name, kind in SHORTCUTS.items() if not kind.falls), [1.0] * 4, falling):
        for branches in ("attention", "mlp"):
            with raises_user_error("branches"):
                shortcuts(2, 1.0, schedule, branches=branches)


def test_the_documentation_lists_the_table():
    text = (Path(__file__).parents[2] / "docs" / "shortcuts.md").read_text()
    for name, kind in SHORTCUTS.items():
        start = "yes" if kind.plain_start else "no"
        row, *_ = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]  # the second is of the cost
        assert row.startswith(f"| `{name}` | {kind.formula} |")
        assert row.endswith(f"| {start} | {kind.source} |")
        if kind.numbers:
            assert f"| {kind.build(Plan((0.0, 0.0))).learned or 'nothing'} |" in row


@pytest.mark.parametrize(("name", "kind"), SHORTCUTS.items())
def test_the_table_says_which_networks_start_as_the_plain_one(name, kind):
    """U-ViTs whose branches start at 0, layer by layer."""
    nets = [UVIT.small(zero_init=True, **chosen).eval() for chosen in ({}, options(name))]
    nets[1].load_state_dict(nets[1].state_dict() | dict(nets[0].named_parameters()))
    with torch.no_grad():
        states = [torch.stack([*net.forward_intermediates(*UVIT.inputs())]) for net in nets]
    close, equal = (torch.allclose(*states, rtol=most, atol=most) for most in (1e-3, 1e-6))
    assert close == equal == kind.plain_start


PAPER_ROWS = {
    "plain": dict(alpha_min=1.0),
    "x + sqrt(1/2) f": dict(alpha_min=1.0, schedule="constant-branch"),
    "alpha_min 0.6, attention only": dict(alpha_min=0.6, branches="attention"),
    "alpha_min 0.6, MLP only": dict(alpha_min=0.6, branches="mlp"),
    "alpha_min 0.7": dict(alpha_min=0.7),
    "cosine, alpha_min 0.7": dict(alpha_min=0.7, schedule="cosine"),
    "alpha_min 0.6": dict(alpha_min=0.6),
    "cosine, alpha_min 0.6": dict(alpha_min=0.6, schedule="cosine"),
    "sqrt(1/2) (x + f)": dict(alpha_min=1.0, schedule="constant"),
}


def test_the_documentation_orders_the_rows_of_the_paper_by_what_is_left_of_the_input():
    text = (Path(__file__).parents[2] / "docs" / "equivalence.md").read_text()
    left = [-math.log10(math.prod(shortcuts(12, **row).alphas)) + 0.0 for row in PAPER_ROWS.values()]
    assert left == sorted(left)
    for row, number in zip(PAPER_ROWS, left, strict=True):
        assert f"| {row} | {abs(number):.2f} | " in text


def test_stochastic_depth_multiplies_the_weights_of_branches():
    """A branch with the gain in its last layer is dropped and kept as one with the gain as its beta."""
    sizes = dict(image_size=16, patch_size=4, channels=3, dim=16, depth=2, heads=2, num_classes=3)
    torch.manual_seed(0)
    gained, plain = ViT(**sizes, alpha_min=0.6, schedule="gain"), ViT(**sizes)
    weights = {name: value.detach().clone() for name, value in gained.named_parameters()}
    for end, beta in zip(gained.branch_ends(), gained.shortcuts.betas, strict=True):
        weights[f"{end}.weight"] *= beta
        weights[f"{end}.bias"] *= beta
    plain.load_state_dict(plain.state_dict() | weights)
    x, keep = torch.randn(2, 3, 16, 16), torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [2.0, 0.0]])
    torch.testing.assert_close(gained(x, keep), plain(x, keep), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain(x, keep), plain(x), rtol=1e-2)
