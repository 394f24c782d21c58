"""LayerSync, the dispersive loss and REPA: their values and gradients, what they log, store and refuse."""

import io
import math
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import timm
import torch
from conftest import same, tiny_net, tiny_task, tiny_trainer
from refusals import raises_user_error
from safetensors.torch import save_file
from small_teacher import save_teacher
from torch import nn
from torch.nn.functional import interpolate

from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.data.batches import Batch
from uvit_decay.latents.space import LatentSpace
from uvit_decay.nn import UViT
from uvit_decay.tasks import REPA, DiffusionTask, DispersiveLoss, LayerSync
from uvit_decay.tasks.losses.layersync import default_pair
from uvit_decay.tasks.losses.repa import ConvProjector, open_teacher, resize_grid
from uvit_decay.terminal.errors import UserError

BATCH = Batch(torch.zeros(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64), 0, 0, 6)


class Blocks(nn.Module):
    """A network of this depth as losses see it, with two prefix tokens."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.num_prefix_tokens, self.dim, self.image_size, self.channels = 2, 4, 8, 1
        self.layers = tuple(tiny_net().layers[:1]) * (depth + 1)


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("depth", "pair"), [(28, (8, 16)), (24, (8, 18)), (12, (4, 8)), (6, (2, 4)), (3, (1, 2))])
def test_layersync_aligns_blocks_by_depth(depth, pair):
    assert default_pair(depth) == pair


def test_layersync_names_no_layers_of_a_network_that_is_too_small():
    with raises_user_error("three", 2, "student", "reference"):
        LayerSync().bind(Blocks(2))
    with raises_user_error("three", 2):
        LayerSync(student=1).bind(Blocks(2))


def test_layersync_is_the_negative_cosine_of_patch_tokens_whose_reference_has_no_gradient():
    loss = LayerSync()
    loss.num_prefix_tokens = 2
    student, reference = tokens(6, 5, 4, seed=1).float().requires_grad_(), tokens(6, 5, 4, seed=2).float()
    reference.requires_grad_()
    value = loss({"1": student, "2": reference}, BATCH, None)
    a, b = student.detach()[:, 2:].double(), reference.detach()[:, 2:].double()
    cosines = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    assert value.item() == pytest.approx(-cosines.mean().item(), abs=1e-6)
    value.backward()
    assert reference.grad is None
    unit = a / a.norm(dim=-1, keepdim=True)
    other = b / b.norm(dim=-1, keepdim=True)
    expected = -(other - cosines[..., None] * unit) / a.norm(dim=-1, keepdim=True) / cosines.numel()
    torch.testing.assert_close(student.grad[:, 2:].double(), expected, atol=1e-6, rtol=1e-4)
    assert not student.grad[:, :2].any()
    scaled = loss({"1": 7.0 * student.detach(), "2": 0.1 * reference.detach()}, BATCH, None)
    assert scaled.item() == pytest.approx(value.item(), abs=1e-6)  # so that decay and gain have the same loss

    with raises_user_error("reference", (6, 1, 4), (6, 5, 4)):  # which would be broadcast
        LayerSync()({"1": student, "2": reference[:, :1]}, BATCH, None)


def dispersive(length: str, z, tau: float):
    """Return the equation of the paper, written out."""
    if length == "free":
        z = z / z.square().mean().sqrt()
    count, size = len(z), z[0].numel()
    terms = [(-(z[i] - z[j]).square().sum() / size / tau).exp() for i in range(count) for j in range(count)]
    return (torch.stack(terms).sum() / count**2).log()


@pytest.mark.parametrize("length", ["kept", "free"])
@pytest.mark.parametrize("version", ["jax", "pytorch"])
def test_the_dispersive_loss_and_its_gradient_are_those_of_the_equation(version, length):
    loss = DispersiveLoss(version, length=length)
    z = tokens(6, 5, 4).requires_grad_()
    expected = dispersive(length, z, {"jax": 0.5, "pytorch": 1.0}[version])
    (gradient,) = torch.autograd.grad(expected, z)
    ours = z.detach().float().requires_grad_()
    value = loss({"1": ours}, BATCH, None)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(ours.grad.double(), gradient, atol=1e-5, rtol=1e-3)


def test_the_dispersive_loss_measures_distance_and_what_is_left_of_its_gradient():
    loss = DispersiveLoss(tau=0.5)
    z = tokens(6, 5, 4).float()
    loss({"1": z}, BATCH, None)
    flat = z.flatten(1).double()
    distances = torch.cdist(flat, flat).square() / flat.shape[1]
    others = distances[~torch.eye(6, dtype=torch.bool)]
    assert loss.figures["distance"].item() == pytest.approx(others.mean().item(), rel=1e-5)
    left = (-others / 0.5).exp().sum()
    assert loss.figures["gradient_left"].item() == pytest.approx((left / (left + 6)).item(), rel=1e-4)
    assert loss({"1": 100 * z}, BATCH, None).item() == pytest.approx(-math.log(6))  # the diagonal alone
    assert loss.figures["gradient_left"] < 1e-6


@pytest.mark.parametrize(("version", "block"), [("jax", 3), ("pytorch", 12)])
def test_the_versions_of_the_dispersive_loss_choose_the_layer(version, block):
    loss = DispersiveLoss(version)
    loss.bind(Blocks(12))
    assert loss.layers == [block]
    assert (loss.weight, loss.tau) == {"jax": (0.5, 0.5), "pytorch": (0.25, 1.0)}[version]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return a small MAE of the digits, as a checkpoint."""
    return str(save_teacher(tmp_path_factory.mktemp("teacher")))


@pytest.mark.parametrize(("kind", "zscore"), [("mlp", None), ("conv", None), ("conv", 0.3)])
def test_repa_is_the_negative_cosine_to_the_tokens_of_the_encoder(kind, zscore, teacher):
    torch.manual_seed(0)
    width = {"hidden": 8} if kind == "mlp" else {}
    net, loss = tiny_net(), REPA(teacher, projector=kind, zscore=zscore, **width)
    loss.bind(net)
    encoder = load(teacher).net
    images = torch.randn(6, 1, 8, 8).clamp(-1, 1)
    patches = (8 // net.config["patch_size"]) ** 2
    *_, last = encoder.forward_intermediates(images)
    expected = last[:, encoder.num_prefix_tokens :].detach()
    if kind == "conv":
        factor = 0.8 if zscore is None else zscore
        expected = (expected - factor * expected.mean(1, keepdim=True)) / (expected.std(1, keepdim=True) + 1e-6)
    assert expected.shape[1] == patches
    torch.testing.assert_close(loss.target(images, patches), expected)
    tokens_ = torch.randn(6, net.num_prefix_tokens + patches, net.dim, requires_grad=True)
    value = loss({"1": tokens_}, BATCH._replace(images=images), torch.rand(6))
    projected = loss.projector(tokens_[:, net.num_prefix_tokens :]).detach()
    cosines = (projected * expected).sum(-1) / projected.norm(dim=-1) / expected.norm(dim=-1)
    assert value.item() == pytest.approx(-cosines.mean().item(), abs=1e-5)
    value.backward()
    assert tokens_.grad[:, net.num_prefix_tokens :].any()
    assert not any(parameter.requires_grad for parameter in loss.teacher.net.parameters())
    assert all("teacher" not in name for name in loss.state_dict())
    assert loss.weight == 0.5


def test_the_published_recipe_of_latents_is_another_than_of_pixels(teacher, monkeypatch):
    space = LatentSpace("a vae", "", scale=1.0, shift=0.0, channels=1, factor=8)
    found = replace(open_teacher(teacher), latents=space)
    monkeypatch.setattr("uvit_decay.tasks.losses.repa.open_teacher", lambda *_: found)
    for options, expected in (({}, (0.6, 1.0)), ({"weight": 0.2}, (0.6, 0.2)), ({"zscore": 0.0}, (0.0, 1.0))):
        loss = REPA(teacher, projector="conv", **options)
        assert (loss.zscore, loss.weight) == expected


@pytest.mark.parametrize(
    "make",
    [
        DispersiveLoss,
        LayerSync,
        *(lambda teacher, kind=kind: REPA(teacher, projector=kind) for kind in ("mlp", "conv")),
    ],
)
def test_a_task_with_any_loss_goes_through_a_pickle(make, teacher):
    """Programs that store a whole task, and spawned processes, need it."""
    loss = make(teacher) if make not in (DispersiveLoss, LayerSync) else make()
    torch.manual_seed(0)
    task = DiffusionTask(UViT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10), auxiliary=[loss])
    file = io.BytesIO()
    torch.save(task, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert same(again.state_dict(), task.state_dict())
    states = [tokens(6, 18, 16, seed=i).float() for i in again.auxiliary.layers]
    values = [each.auxiliary.values(states, BATCH, None) for each in (task, again)]
    assert values[0] == values[1]
    assert ForkingPickler.dumps(again)


@pytest.mark.parametrize(("depth", "layer"), [(28, 8), (24, 8), (23, 8), (12, 4), (3, 1)])
def test_repa_chooses_the_layer_by_depth(depth, layer, teacher):
    loss = REPA(teacher, hidden=8)
    loss.bind(Blocks(depth))
    assert loss.layers == [layer]


def test_timm_encoders_see_224_pixels_with_pretrained_weights_and_with_a_file(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=0).eval()  # of 160 pixels
    for value in model.parameters():
        nn.init.normal_(value, std=0.05)
    snapshot = tmp_path / "models--timm--test_vit.r160_in1k" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    save_file(model.state_dict(), snapshot / "model.safetensors")
    (tmp_path / "models--timm--test_vit.r160_in1k" / "refs").mkdir()
    (tmp_path / "models--timm--test_vit.r160_in1k" / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    targets = []
    for name in ("timm:test_vit", f"timm:test_vit={snapshot / 'model.safetensors'}"):
        loss = REPA(name, hidden=8)
        assert loss.teacher.net.image_size == 224
        targets.append(loss.target(images, 14**2))
    assert torch.equal(*targets)
    model.set_input_size((224, 224))
    pictures = interpolate(images.expand(-1, 3, -1, -1), size=(224, 224), mode="bicubic", antialias=True).clamp(-1, 1)
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = model.forward_features(((pictures + 1) / 2 - mean) / std)  # after the final norm
    torch.testing.assert_close(targets[0], expected[:, 1:], atol=1e-5, rtol=1e-4)


def test_the_conv_projector_keeps_the_rows_of_the_grid():
    projector = ConvProjector(1, 1)
    nn.init.zeros_(projector.weight)
    nn.init.zeros_(projector.bias)
    with torch.no_grad():
        projector.weight[0, 0, 1, 2] = 1.0  # the right neighbour
    found = projector(torch.arange(1.0, 10.0).reshape(1, 9, 1)).flatten()
    assert found.tolist() == [2, 3, 0, 5, 6, 0, 8, 9, 0]


def test_a_teacher_of_other_images_is_refused(teacher):
    loss = REPA(teacher, hidden=8)
    loss.bind(tiny_net(channels=3))
    for latents, fragments in ((None, ("teacher", 1, 3)), ("a space", ("teacher", "pixels", "latents"))):
        with raises_user_error(*fragments):
            loss.prepare(SimpleNamespace(latents=latents), 4)


def test_a_grid_of_tokens_is_resized():
    grid = torch.arange(16.0).reshape(1, 4, 4, 1).flatten(1, 2)
    half = resize_grid(grid, 4)
    assert half.shape == (1, 4, 1)
    weights = torch.tensor([[3.0, 3.0, 1.0, 0.0], [0.0, 1.0, 3.0, 3.0]]) / 7  # triangles two patches wide
    expected = weights @ grid.reshape(4, 4) @ weights.T
    torch.testing.assert_close(half.flatten(), expected.flatten())
    assert resize_grid(grid, 16) is grid


def test_misfits_are_refused_before_training(teacher, tmp_path):
    net = tiny_net()
    for make, fragments in {
        (lambda: tiny_task(net, auxiliary=[LayerSync(2, 1)])): ("student", "layer 2", "reference, 1"),
        (lambda: tiny_task(net, auxiliary=[LayerSync("nowhere", 1)])): ("nowhere",),
        (lambda: tiny_task(net, auxiliary=[DispersiveLoss(layer=99)])): ("99",),
        (lambda: REPA(str(tmp_path / "missing.ckpt"))): ("missing.ckpt",),
        (lambda: REPA("checkpoints/digits.safetensors")): ("checkpoints/digits.safetensors",),
    }.items():
        with pytest.raises(UserError) as error:
            make()
        assert all(fragment in str(error.value) for fragment in fragments)
    task = tiny_task(tiny_net(), auxiliary=[DispersiveLoss()])
    with pytest.raises(UserError, match="device_batch_size"):
        tiny_trainer(tmp_path, max_steps=1).fit(task, Digits(4, device_batch_size=1))


def test_other_micro_batches_than_the_checkpoints_are_refused(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.fit(tiny_task(tiny_net(), auxiliary=[DispersiveLoss()]), Digits(32))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    task = tiny_task(tiny_net(), auxiliary=[DispersiveLoss()])
    with pytest.raises(UserError, match=r"32.*16"):
        tiny_trainer(tmp_path, max_steps=2).fit(task, Digits(32, device_batch_size=16), ckpt_path=tmp_path / "a.ckpt")
