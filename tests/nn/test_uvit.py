"""U-ViT against the official sizes, key layout, initialisation and function, and the decay through its trunk."""

import math

import jaxtyping
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from uvit_decay.decay import shortcuts
from uvit_decay.errors import UserError
from uvit_decay.nn import UViT
from uvit_decay.nn.tap import Tapped, pooled_features
from uvit_decay.nn.zoo import build

SMALL = dict(image_size=8, patch_size=2, channels=3, dim=16, depth=4, heads=2)

PIXELS_32, PIXELS_64 = dict(image_size=32, channels=3), dict(image_size=64, channels=3)
LATENTS_32, LATENTS_64 = dict(image_size=32, channels=4), dict(image_size=64, channels=4)
PARAMETERS = [
    ("uvit-s/2", PIXELS_32, 44_255_328),
    ("uvit-s/2", dict(num_classes=10, null_label=False, **PIXELS_32), 44_260_960),
    ("uvit-s/2", dict(num_classes=100, null_label=False, **PIXELS_32), 44_307_040),
    ("uvit-s-deep/2", PIXELS_32, 57_908_320),
    ("uvit-s/4", PIXELS_64, 44_292_228),
    ("uvit-m/4", dict(num_classes=1000, null_label=False, **PIXELS_64), 130_940_292),
    ("uvit-l/4", dict(num_classes=1000, null_label=False, **PIXELS_64), 286_827_652),
    ("uvit-l/2", dict(num_classes=1000, **LATENTS_32), 286_763_172),
    ("uvit-h/2", dict(num_classes=1000, **LATENTS_32), 500_832_016),
    ("uvit-l/4", dict(num_classes=1000, **LATENTS_64), 286_861_524),
    ("uvit-h/4", dict(num_classes=1000, **LATENTS_64), 500_942_656),
    ("uvit-m/2", LATENTS_32, 130_122_404),
    ("uvit-m/2", dict(num_classes=100, null_label=False, **LATENTS_32), 130_199_972),
    ("uvit-m/2", dict(num_classes=100, **LATENTS_32), 130_200_740),
    ("uvit-m/4", LATENTS_32, 130_048_724),
]
VARIANTS = {
    "unconditional": dict(),
    "labels": dict(num_classes=3),
    "labels-without-null": dict(num_classes=3, null_label=False),
    "patch-4": dict(patch_size=4, channels=1),
    "time-mlp": dict(mlp_time_embed=True),
    "qkv-bias": dict(qkv_bias=True),
    "no-conv": dict(conv=False),
    "no-skip": dict(skip=False),
    "narrow-mlp": dict(mlp_ratio=2.0),
    "time-1000": dict(time_scale=1000.0),
}


def small(**options):
    torch.manual_seed(0)
    return UViT(**SMALL | options)


def official_shapes(
    image_size,
    patch_size,
    channels,
    dim,
    depth,
    num_classes=0,
    null_label=True,
    conv=True,
    skip=True,
    mlp_time_embed=False,
    qkv_bias=False,
    mlp_ratio=4.0,
    **_,
):
    """Names and shapes of an official U-ViT file, written down from its published layout."""
    values, tokens, hidden = patch_size**2 * channels, (image_size // patch_size) ** 2, int(dim * mlp_ratio)
    shapes = {
        "pos_embed": (1, tokens + (2 if num_classes else 1), dim),
        "patch_embed.proj.weight": (dim, channels, patch_size, patch_size),
        "patch_embed.proj.bias": (dim,),
        "norm.weight": (dim,),
        "norm.bias": (dim,),
        "decoder_pred.weight": (values, dim),
        "decoder_pred.bias": (values,),
    }
    if mlp_time_embed:
        shapes |= {"time_embed.0.weight": (4 * dim, dim), "time_embed.0.bias": (4 * dim,)}
        shapes |= {"time_embed.2.weight": (dim, 4 * dim), "time_embed.2.bias": (dim,)}
    if num_classes:
        shapes["label_emb.weight"] = (num_classes + 1 if null_label else num_classes, dim)
    if conv:
        shapes |= {"final_layer.weight": (channels, channels, 3, 3), "final_layer.bias": (channels,)}
    sides = [f"{side}_blocks.{i}" for side in ("in", "out") for i in range(depth // 2)]
    for block in [*sides, "mid_block"]:
        shapes |= {f"{block}.{norm}.{kind}": (dim,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
        shapes |= {f"{block}.attn.qkv.weight": (3 * dim, dim)}
        shapes |= {f"{block}.attn.proj.weight": (dim, dim), f"{block}.attn.proj.bias": (dim,)}
        shapes |= {f"{block}.mlp.fc1.weight": (hidden, dim), f"{block}.mlp.fc1.bias": (hidden,)}
        shapes |= {f"{block}.mlp.fc2.weight": (dim, hidden), f"{block}.mlp.fc2.bias": (dim,)}
        if qkv_bias:
            shapes[f"{block}.attn.qkv.bias"] = (3 * dim,)
        if skip and block.startswith("out"):
            shapes |= {f"{block}.skip_linear.weight": (dim, 2 * dim), f"{block}.skip_linear.bias": (dim,)}
    return shapes


def random_state(seed=0, **options):
    """A random state_dict in the official layout, scaled so that every part matters in the output."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in official_shapes(**options).items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            state[name] = 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            state[name] = 0.1 * values
        elif name in ("pos_embed", "label_emb.weight"):
            state[name] = 0.5 * values
        else:
            state[name] = values / math.sqrt(math.prod(shape[1:]))
    return state


def official_forward(w, x, t, y=None, *, dim, depth, heads, patch_size, time_scale=999.0, alphas=None, betas=None, **_):
    """The published forward pass, one step after the other on a state_dict `w`, with one alpha and beta a branch."""
    count, channels, size, _ = x.shape
    alphas = iter(alphas or [1.0] * (2 * depth + 2))
    betas = iter(betas or [1.0] * (2 * depth + 2))

    def linear(name, h):
        out = h @ w[name + ".weight"].T
        return out + w[name + ".bias"] if name + ".bias" in w else out

    def norm(name, h):
        centred = h - h.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[name + ".weight"] + w[name + ".bias"]
        )

    def attention(name, h):
        q, k, v = linear(name + ".qkv", h).split(dim, dim=-1)
        head, width = [], dim // heads
        for i in range(0, dim, width):
            scores = q[..., i : i + width] @ k[..., i : i + width].transpose(1, 2) / math.sqrt(width)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            head.append(weights / weights.sum(-1, keepdim=True) @ v[..., i : i + width])
        return linear(name + ".proj", torch.cat(head, -1))

    def mlp(name, h):
        h = linear(name + ".fc1", h)
        return linear(name + ".fc2", h * 0.5 * (1 + torch.erf(h / math.sqrt(2))))

    def block(name, h, skip=None):
        if name + ".skip_linear.weight" in w:
            h = linear(name + ".skip_linear", torch.cat([h, skip], -1))
        h = next(alphas) * h + next(betas) * attention(name + ".attn", norm(name + ".norm1", h))
        return next(alphas) * h + next(betas) * mlp(name + ".mlp", norm(name + ".norm2", h))

    patches = functional.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=patch_size)
    h = patches.flatten(2).transpose(1, 2)
    half = dim // 2
    angles = (time_scale * t)[:, None] * torch.exp(-math.log(1e4) * torch.arange(half) / half)
    time = torch.cat([angles.cos(), angles.sin()], -1)
    if "time_embed.0.weight" in w:
        time = linear("time_embed.0", time)
        time = linear("time_embed.2", time / (1 + torch.exp(-time)))
    extra = [time] if y is None else [w["label_emb.weight"][y], time]
    h = torch.cat([torch.stack(extra, 1), h], 1) + w["pos_embed"]

    memory = []
    for i in range(depth // 2):
        h = block(f"in_blocks.{i}", h)
        memory.append(h)
    h = block("mid_block", h)
    for i in range(depth // 2):
        h = block(f"out_blocks.{i}", h, memory.pop())
    h = linear("decoder_pred", norm("norm", h))[:, len(extra) :]

    image = torch.empty(count, channels, size, size)
    side = size // patch_size
    for row in range(side):
        for column in range(side):
            values = h[:, row * side + column].reshape(count, patch_size, patch_size, channels)
            down, across = row * patch_size, column * patch_size
            image[:, :, down : down + patch_size, across : across + patch_size] = values.permute(0, 3, 1, 2)
    if "final_layer.weight" in w:
        image = functional.conv2d(image, w["final_layer.weight"], w["final_layer.bias"], padding=1)
    return image


def inputs(image_size=8, channels=3, num_classes=0, count=3, **_):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, channels, image_size, image_size, generator=generator)
    return x, torch.tensor([0.02, 0.5, 0.997])[:count], torch.arange(count) % num_classes if num_classes else None


def loaded(**options):
    """A small network with random weights of the official layout, in which no branch is silent."""
    net = small(**options)
    net.load_state_dict(random_state(**SMALL | options), strict=True)
    return net


class RecordOps(TorchDispatchMode):
    """Names of the aten operations that run under it."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


# ---- sizes and layout


@pytest.mark.parametrize(("name", "options", "count"), PARAMETERS)
def test_parameter_counts_are_the_official_ones_and_decay_adds_none(name, options, count):
    with torch.device("meta"):
        nets = [build(name, alpha_min=alpha_min, **options) for alpha_min in (1.0, 0.7)]
    assert [sum(parameter.numel() for parameter in net.parameters()) for net in nets] == [count, count]


@pytest.mark.parametrize(
    ("name", "options", "tensors"),
    [("uvit-s/2", PIXELS_32, 164), ("uvit-h/2", dict(num_classes=1000, **LATENTS_32), 355)],
)
def test_official_sizes_have_the_official_tensors_and_the_alphas(name, options, tensors):
    with torch.device("meta"):
        net = build(name, **options)
    shapes = {key: tuple(value.shape) for key, value in net.state_dict().items()}
    assert shapes.pop("alphas") == (2 * (net.config["depth"] + 1),)
    assert shapes == official_shapes(**net.config)
    assert len(shapes) == tensors


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_has_the_official_names_and_shapes_and_only_alphas_besides(variant):
    options = SMALL | VARIANTS[variant]
    shapes = {key: tuple(value.shape) for key, value in small(**options).state_dict().items()}
    assert shapes == official_shapes(**options) | {"alphas": (10,)}


@pytest.mark.parametrize("name", ["uvit-xxl/2", "uvit-s", "uvit-s/", "uvit-s/two", "/2", ""])
def test_unknown_names_are_user_errors_that_list_the_sizes(name):
    with pytest.raises(UserError, match="uvit-s-deep"):
        build(name)


# ---- the official function


@pytest.mark.parametrize("variant", VARIANTS)
def test_official_weights_give_the_official_function_at_alpha_min_one(variant):
    options = SMALL | VARIANTS[variant]
    state, arguments = random_state(**options), inputs(**options)
    net = small(**options, alpha_min=1.0).eval()
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        expected = official_forward(state, *arguments, **options)
        assert expected.std() > 0.3
        torch.testing.assert_close(net(*arguments), expected, atol=1e-5, rtol=1e-5)


def test_official_weights_give_the_official_function_at_the_real_size():
    options = dict(image_size=32, patch_size=2, channels=3, dim=512, depth=12, heads=8)
    state, arguments = random_state(**options), inputs(**options, count=1)
    net = build("uvit-s/2", **PIXELS_32)
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        expected = official_forward(state, *arguments, **options)
        torch.testing.assert_close(net(*arguments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        (dict(alpha_min=0.6), dict(alphas=[1 - 0.4 * k / 9 for k in range(10)])),
        (dict(alpha_min=0.6, skip=False), dict(alphas=[1 - 0.4 * k / 9 for k in range(10)])),
        (
            dict(alpha_min=0.6, granularity="block", index="v2", branches="mlp"),
            dict(alphas=[1, 0.92, 1, 0.84, 1, 0.76, 1, 0.68, 1, 0.6]),
        ),
        (
            dict(alpha_min=0.6, schedule="cosine"),
            dict(alphas=[0.8 + 0.2 * math.cos(math.pi * k / 9) for k in range(10)]),
        ),
        (dict(alpha_min=0.6, schedule="learnable"), dict(alphas=[1 - 0.4 * k / 9 for k in range(10)])),
        (dict(schedule="constant"), dict(alphas=[math.sqrt(0.5)] * 10, betas=[math.sqrt(0.5)] * 10)),
        (dict(schedule="constant-branch"), dict(betas=[math.sqrt(0.5)] * 10)),
    ],
    ids=["linear", "linear-no-skip", "mlp-only-v2-blocks", "cosine", "learnable", "constant", "constant-branch"],
)
def test_decay_scales_the_shortcuts_in_execution_order_after_the_skip_merge(options, scales):
    net = loaded(num_classes=3, **options).eval()
    arguments = inputs(num_classes=3)
    with torch.no_grad():
        expected = official_forward(net.state_dict(), *arguments, **SMALL, **scales)
        torch.testing.assert_close(net(*arguments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alpha_min", [1.0, 0.7, 0.5])
def test_with_silent_branches_the_trunk_multiplies_the_embeddings_by_every_alpha(alpha_min):
    net = loaded(alpha_min=alpha_min, skip=False)
    for block in net.blocks():
        block.zero_init()
    with torch.no_grad():
        first, *_, last = net.trunk(*inputs())
    expected = first
    for k in range(10):
        expected = expected * (1.0 - (1.0 - alpha_min) * k / 9)
    assert torch.equal(last, expected)
    torch.testing.assert_close(last, first * math.prod(net.alphas.tolist()), atol=1e-6, rtol=1e-6)


def test_the_decayed_forward_pass_runs_the_same_operations_as_the_ordinary_one():
    plain, decayed = RecordOps(), RecordOps()
    for recorder, alpha_min in ((plain, 1.0), (decayed, 0.7)):
        net = loaded(alpha_min=alpha_min, num_classes=3)
        with recorder, torch.no_grad():
            net(*inputs(num_classes=3))
    assert decayed.ops == plain.ops
    assert decayed.ops.count("aten.add.Tensor") == 10 + 1


# ---- initialisation


@pytest.mark.parametrize("options", [dict(), dict(num_classes=100, mlp_time_embed=True, qkv_bias=True)])
def test_official_initialisation_has_the_official_statistics(options):
    net = small(dim=256, heads=4, image_size=32, **options)
    normal = {"pos_embed": net.pos_embed}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            normal[name] = module.weight
            assert module.bias is None or not module.bias.any()
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones(256))
            assert torch.equal(module.bias, torch.zeros(256))
        if isinstance(module, nn.Conv2d):
            bound = 1 / math.sqrt(module.weight[0].numel())
            assert 0.85 * bound < module.weight.abs().max() <= bound
            assert 0 < module.bias.abs().max() <= bound
    for weight in normal.values():
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert abs(weight.mean().item()) < 4 * 0.02 / math.sqrt(weight.numel())
        assert weight.abs().max() > 0.055
    if "num_classes" in options:
        assert net.label_emb.weight.std().item() == pytest.approx(1.0, rel=0.05)


def test_xavier_initialisation_is_uniform_with_wide_positions_and_labels():
    net = small(dim=64, image_size=32, num_classes=100, init="xavier")
    for module in net.modules():
        if isinstance(module, nn.Linear):
            bound = math.sqrt(6 / sum(module.weight.shape))
            assert 0.95 * bound < module.weight.abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
            assert module.bias is None or not module.bias.any()
    assert net.pos_embed.std().item() == pytest.approx(0.2, rel=0.05)
    assert net.label_emb.weight.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("init", ["official", "xavier"])
@pytest.mark.parametrize(
    ("alpha_min", "zero_init", "silent"),
    [(1.0, None, False), (0.999, None, True), (0.6, None, True), (0.6, False, False), (1.0, True, True)],
)
def test_branches_start_silent_if_decayed_unless_said_otherwise(alpha_min, zero_init, silent, init):
    net = small(alpha_min=alpha_min, zero_init=zero_init, init=init)
    for block in net.blocks():
        for linear in (block.attn.proj, block.mlp.fc2):
            assert bool(linear.weight.any()) != silent
            assert not linear.bias.any()
        assert block.attn.qkv.weight.any()
        assert block.mlp.fc1.weight.any()
        assert block.skip_linear is None or block.skip_linear.weight.any()


def test_alpha_min_changes_no_random_draw_of_the_initialisation():
    plain, decayed = small().state_dict(), small(alpha_min=0.7, zero_init=False).state_dict()
    assert [key for key in plain if not torch.equal(plain[key], decayed[key])] == ["alphas"]


# ---- checkpointing of activations


def gradients(net):
    net(*inputs(num_classes=3)).square().mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("schedule", ["linear", "learnable"])
def test_recomputed_activations_give_identical_loss_and_gradients(schedule):
    options = dict(num_classes=3, alpha_min=0.7, schedule=schedule)
    plain, recomputed = loaded(**options), loaded(**options, checkpointing=True)
    assert torch.equal(plain(*inputs(num_classes=3)), recomputed(*inputs(num_classes=3)))
    expected, actual = gradients(plain), gradients(recomputed)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert torch.equal(gradient, actual[name]), name


@pytest.mark.parametrize(("checkpointing", "training", "runs"), [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_blocks_are_recomputed_only_with_checkpointing_and_in_training(checkpointing, training, runs):
    net = loaded(num_classes=3, checkpointing=checkpointing).train(training)
    calls = []
    for block in net.blocks():
        block.register_forward_pre_hook(lambda block, _: calls.append(block))
    gradients(net)
    assert [calls.count(block) for block in net.blocks()] == [runs] * 5


# ---- loading


@pytest.mark.parametrize(
    ("stored", "asked", "named"),
    [
        (dict(alpha_min=0.8), dict(alpha_min=0.7), "0.8 .* 0.7 "),
        (dict(alpha_min=1.0), dict(alpha_min=0.7), "1 .. 1 .* 0.7 "),
        (dict(alpha_min=0.7), dict(alpha_min=1.0), "0.7 .* 1 .. 1 "),
        (dict(alpha_min=0.7, depth=2), dict(alpha_min=0.7, depth=4), "over 6 branches.* over 10"),
        (dict(alpha_min=0.7, schedule="cosine"), dict(alpha_min=0.7), "alphas"),
        (dict(alpha_min=0.7, schedule="learnable"), dict(alpha_min=0.8), "0.7 .* 0.8 "),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_another_decay_are_refused_with_both_named(stored, asked, named, strict):
    with pytest.raises(UserError, match=named):
        small(**asked).load_state_dict(small(**stored).state_dict(), strict=strict)


def test_refused_weights_leave_the_network_as_it_was():
    net = small(alpha_min=0.7)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(UserError):
        net.load_state_dict(loaded(alpha_min=0.8).state_dict())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_weights_round_trip_through_their_own_decay():
    source, target = loaded(alpha_min=0.7, num_classes=3), small(alpha_min=0.7, num_classes=3)
    target.load_state_dict(source.state_dict(), strict=True)
    arguments = inputs(num_classes=3)
    assert torch.equal(source(*arguments), target(*arguments))


@pytest.mark.parametrize(
    "options", [dict(alpha_min=1.0), dict(alpha_min=0.7), dict(alpha_min=0.7, schedule="learnable")]
)
def test_files_without_alphas_load_strictly_and_leave_the_alphas_as_asked(options):
    net = small(**options)
    net.load_state_dict(random_state(**SMALL), strict=True)
    assert torch.equal(net.alphas.detach(), torch.tensor(shortcuts(5, options["alpha_min"]).alphas))


def test_loading_does_not_change_the_callers_dict():
    state = random_state(**SMALL)
    before = dict(state)
    small(alpha_min=0.7).load_state_dict(state)
    assert state.keys() == before.keys()
    assert all(state[key] is before[key] for key in before)


def test_the_decay_is_checked_under_a_prefix_too():
    wrapped, other = nn.ModuleDict({"net": small(alpha_min=0.7)}), nn.ModuleDict({"net": small(alpha_min=0.8)})
    wrapped.load_state_dict({"net." + key: value for key, value in random_state(**SMALL).items()}, strict=True)
    with pytest.raises(UserError, match="alphas"):
        wrapped.load_state_dict(other.state_dict())


@pytest.mark.parametrize("missing", ["pos_embed", "mid_block.mlp.fc2.bias", "out_blocks.1.skip_linear.weight"])
def test_strict_loading_still_refuses_incomplete_files(missing):
    state = random_state(**SMALL)
    del state[missing]
    with pytest.raises(RuntimeError, match=missing):
        small().load_state_dict(state, strict=True)


def test_learned_alphas_travel_with_the_weights():
    source, target = loaded(schedule="learnable", alpha_min=0.7), small(schedule="learnable")
    with torch.no_grad():
        source.alphas.mul_(0.9)
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(target.alphas, source.alphas)
    assert torch.equal(target(*inputs()), source(*inputs()))


# ---- labels and alphas


def test_no_labels_means_the_null_label():
    net = loaded(num_classes=3)
    x, t, labels = inputs(num_classes=3)
    assert torch.equal(net(x, t), net(x, t, torch.full((3,), 3)))
    assert not torch.allclose(net(x, t), net(x, t, labels))


def test_a_network_without_null_label_asks_for_classes():
    net = loaded(num_classes=3, null_label=False)
    x, t, labels = inputs(num_classes=3)
    assert net(x, t, labels).shape == x.shape
    with pytest.raises(UserError, match="null label"):
        net(x, t)
    with pytest.raises(UserError, match="null label"):
        pooled_features(net, x, t)


def test_learnable_alphas_are_parameters_and_all_receive_gradients():
    net = loaded(schedule="learnable", alpha_min=0.7)
    assert any(parameter is net.alphas for parameter in net.parameters())
    net(*inputs()).square().mean().backward()
    assert net.alphas.grad.shape == (10,)
    assert net.alphas.grad.all()


def test_gradients_of_learnable_alphas_match_finite_differences():
    net = loaded(schedule="learnable", alpha_min=0.7).double()
    x, t, _ = inputs()

    def loss(alphas):
        return torch.func.functional_call(net, {"alphas": alphas}, (x.double(), t)).square().mean()

    assert torch.autograd.gradcheck(loss, net.alphas.detach().clone().requires_grad_())


def test_fixed_alphas_are_no_parameters():
    net = small(alpha_min=0.7)
    assert "alphas" in dict(net.named_buffers())
    assert "alphas" not in dict(net.named_parameters())


# ---- precision and compilation


@pytest.mark.parametrize(
    "options",
    [dict(alpha_min=1.0), dict(alpha_min=0.7), dict(alpha_min=0.7, schedule="learnable"), dict(schedule="constant")],
)
def test_bfloat16_autocast_stays_close_to_float32(options):
    net, arguments = loaded(num_classes=3, **options), inputs(num_classes=3)
    with torch.no_grad():
        exact = net(*arguments)
        with torch.autocast("cpu", torch.bfloat16):
            rough = net(*arguments)
    error = (rough.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.02


def test_bfloat16_autocast_leaves_the_embeddings_of_time_and_label_exact():
    net, arguments = loaded(num_classes=3), inputs(num_classes=3)
    with torch.no_grad():
        exact = next(net.trunk(*arguments))
        with torch.autocast("cpu", torch.bfloat16):
            rough = next(net.trunk(*arguments))
    assert rough.dtype == torch.float32
    assert torch.equal(rough[:, :2], exact[:, :2])


@pytest.mark.parametrize(
    "options", [dict(num_classes=3), pytest.param(dict(schedule="learnable"), marks=pytest.mark.slow)]
)
def test_compiled_network_is_one_graph_that_equals_eager_and_can_be_tapped(options, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of the tests
    net, arguments = loaded(**options, alpha_min=0.7, depth=2), inputs(**options)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), net(*arguments), atol=1e-6, rtol=1e-5)
    compiled(*arguments).square().mean().backward()
    actual = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()
    net(*arguments).square().mean().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, atol=1e-6, rtol=1e-4)
    assert torch.equal(pooled_features(compiled, *arguments[:2]), pooled_features(net, *arguments[:2]))


# ---- taps


@pytest.mark.parametrize("depth", [2, 4, 12])
def test_stages_are_the_embeddings_and_every_block_in_execution_order(depth):
    net, half = small(depth=depth), depth // 2
    assert [stage.name for stage in net.stages] == [
        "embeddings",
        *(f"in_blocks.{i}" for i in range(half)),
        "mid_block",
        *(f"out_blocks.{i}" for i in range(half)),
    ]
    assert [stage.kind for stage in net.stages] == [
        "embeddings", *["encoder"] * half, "middle", *["decoder"] * half
    ]  # fmt: skip
    assert len(net.blocks()) == depth + 1
    assert isinstance(net, Tapped)


def test_each_state_of_the_trunk_is_the_output_of_the_module_that_its_stage_names():
    net, seen = loaded(alpha_min=0.7, num_classes=3), {}
    for stage in net.stages[1:]:
        module = net.get_submodule(stage.name)
        module.register_forward_hook(lambda *call, name=stage.name: seen.setdefault(name, call[-1]))
    states = list(net.trunk(*inputs(num_classes=3)))
    assert len(states) == len(net.stages)
    assert list(seen) == [stage.name for stage in net.stages[1:]]
    for state, output in zip(states[1:], seen.values(), strict=True):
        assert state.shape == (3, 2 + 16, 16)
        assert torch.equal(state, output)


@pytest.mark.parametrize(("num_classes", "extras"), [(0, 1), (3, 2)])
def test_pooled_features_are_the_means_over_patch_tokens_under_the_null_label(num_classes, extras):
    net = loaded(alpha_min=0.7, num_classes=num_classes)
    x, t, _ = inputs()
    null = torch.full((3,), num_classes) if num_classes else None
    with torch.no_grad():
        features = pooled_features(net, x, t)
        states = list(net.trunk(x, t, null))
    assert features.shape == (6, 3, 16)
    for stage, state in enumerate(states):
        expected = sum(state[:, token] for token in range(extras, extras + 16)) / 16
        torch.testing.assert_close(features[stage], expected, atol=1e-6, rtol=1e-5)


def test_pooled_features_are_float32_under_bfloat16_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert pooled_features(loaded(), *inputs()[:2]).dtype == torch.float32


# ---- user errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(depth=3), "depth"),
        (dict(depth=0), "depth"),
        (dict(image_size=9), "image_size 9"),
        (dict(patch_size=3), "patch_size 3"),
        (dict(heads=3), "heads 3"),
        (dict(alpha_min=0.0), "alpha_min"),
        (dict(alpha_min=-0.5), "alpha_min"),
        (dict(alpha_min=1.5), "alpha_min"),
        (dict(alpha_min=math.nan), "alpha_min"),
        (dict(alpha_min=0.7, schedule="constant"), "alpha_min"),
    ],
)
def test_impossible_networks_are_user_errors_that_name_the_option(options, named):
    with pytest.raises(UserError, match=named):
        small(**options)
