"""Groups of parameters, rates and schedules against the formulas of MAE's code; resumption of each optimizer."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import Losses, same, state, tiny_net, tiny_trainer
from refusals import find_line, raises_user_error
from runs import StopAt
from small_mae import small_mae
from torch import nn

from uvit_decay import decay
from uvit_decay.callbacks import LastCheckpoint
from uvit_decay.data import Digits
from uvit_decay.nn import ResNet
from uvit_decay.runs.compatibility import check
from uvit_decay.runs.restore import run_length
from uvit_decay.runtime import optimizers
from uvit_decay.tasks import DiffusionTask
from uvit_decay.tasks.optim.options import Optimization, find_hidden_matrices


class Net(nn.Module):
    """Names of a vision transformer of two blocks."""

    layers = ("embeddings", "blocks.0", "blocks.1")

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.ones(1, 1, 2)), nn.Parameter(torch.ones(1, 3, 2))
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 2)

    def layer_id(self, name: str) -> int:
        if name in ("cls_token", "pos_embed"):
            return 0
        return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 3


DECAY_ON = ("all", "matrices", "layers")
VECTORS = {"blocks.0.bias", "blocks.1.bias", "norm.weight", "norm.bias", "head.bias"}


def of_each(net, optim, lr=1.0):
    """Return the learning rate and weight decay of each parameter, by name."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = optim.groups(net, lr)
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_layer_decay_is_the_formula_of_fine_tuning():
    net = Net()
    rates = of_each(net, Optimization(layer_decay=0.65), lr=2.0)
    expected = {"cls_token": 0, "pos_embed": 0, "norm.weight": 3, "norm.bias": 3, "head.weight": 3, "head.bias": 3}
    expected |= {f"blocks.{i}.{kind}": i + 1 for i in (0, 1) for kind in ("weight", "bias")}
    assert rates.keys() == expected.keys()
    for name, layer in expected.items():
        assert rates[name][0] == pytest.approx(2.0 * 0.65 ** (3 - layer))
    assert Optimization(layer_decay=0.65).groups(net, 2.0)[0]["lr"] == 2.0  # the one that is logged


@pytest.mark.parametrize(
    ("decay_on", "without"),
    [
        ("all", set()),
        ("matrices", VECTORS),
        ("layers", VECTORS | {"cls_token", "pos_embed"}),
    ],
)
def test_weight_decay_is_on_the_parameters_that_are_named(decay_on, without):
    decays = of_each(Net(), Optimization(weight_decay=0.05, decay_on=decay_on))
    assert {name for name, (_, decay) in decays.items() if decay == 0.0} == without
    assert {decay for _, decay in decays.values()} <= {0.0, 0.05}


@pytest.mark.parametrize(("schedule", "decays"), [("learnable", 0.05), ("layerscale", 0.0), ("rezero", 0.0)])
def test_learned_alphas_have_weight_decay_and_betas_only_if_all_parameters_have(schedule, decays):
    """App. A.4 of the paper: no regularisation of alphas "beyond standard weight decay"."""
    net = small_mae(schedule=schedule, alpha_min=0.7 if schedule == "learnable" else 1.0)
    name = "alphas" if schedule == "learnable" else "betas"
    found = {on: of_each(net, Optimization(weight_decay=0.05, decay_on=on))[name][1] for on in DECAY_ON}
    assert found == {"all": 0.05, "matrices": decays, "layers": decays}


@pytest.mark.parametrize("options", [{}, {"schedule": "gain"}])
def test_last_layers_of_branches_have_the_rate_over_their_gain(options):
    """P of the branch, whether the decay is in its alphas or in its gain; an MAE's decoder and all else keep theirs."""
    net = small_mae(alpha_min=0.6, **options)
    product, expected = 1.0, {}
    for k, alpha in enumerate(decay.shortcuts(len(net.blocks), 0.6).alphas):
        product *= alpha
        end = f"blocks.{k // 2}.{('attn.proj', 'mlp.fc2')[k % 2]}"
        expected |= {f"{end}.weight": product, f"{end}.bias": product}
    rates = of_each(net, Optimization(rate_over_gain=True, decay_on="matrices"))
    for name, (rate, _) in rates.items():
        assert rate == pytest.approx(expected.get(name, 1.0))
    assert Optimization(rate_over_gain=True).groups(net, 1.0)[0]["lr"] == 1.0  # the one that is logged
    with raises_user_error("rate_over_gain", "MAE"):
        Optimization(rate_over_gain=True).groups(small_mae(schedule="rezero", alpha_min=1.0), 1.0)
    for weights in ((0.0, 1.0), (-0.9, 1.0), (1.0, 0.0), (1.0, -1.0)):
        net = small_mae(schedule=[*[(1.0, 1.0)] * 3, weights], alpha_min=1.0)
        with raises_user_error("alphas", "betas", "rate_over_gain"):
            Optimization(rate_over_gain=True).groups(net, 1.0)


def test_a_network_without_layers_has_no_layer_decay():
    with raises_user_error("layer_decay 0.75", "UViT"):
        Optimization(layer_decay=0.75).groups(tiny_net(), 1.0)


def test_the_schedule_by_epochs_is_that_of_mae():
    optim = Optimization(warmup_epochs=40, schedule="cosine", min_lr=1e-6)
    lr, per_epoch, epochs = 2.4e-3, 7, 800

    def reference(step):
        epoch = step / per_epoch
        if epoch < 40:
            return lr * epoch / 40
        return 1e-6 + (lr - 1e-6) * 0.5 * (1.0 + math.cos(math.pi * (epoch - 40) / (epochs - 40)))

    for step in (0, 1, 100, 279, 280, 281, 3000, 5599, 5600):
        actual = lr * optim.factor(step, epochs * per_epoch, per_epoch, 1e-6 / lr)
        assert actual == pytest.approx(reference(step), rel=1e-12)


def test_wsd_is_constant_until_its_last_steps():
    wsd = Optimization(1.0, warmup_steps=4, schedule="wsd", cooldown=5, min_lr=0.1)
    constant = Optimization(1.0, warmup_steps=4)
    factors = [wsd.factor(step, 20, floor=0.1) for step in range(21)]
    assert factors[:16] == [constant.factor(step, 20) for step in range(16)]
    assert factors[16:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    wsd.check_length(9, 1)
    refused = [(8, 1, ("`cooldown` 5", 8)), (4, 1, ("`warmup_steps`",))]
    refused += [(math.inf, epoch, ("wsd", "`max_steps`")) for epoch in (1, math.inf)]
    for total, epoch, words in refused:
        with raises_user_error(words):
            wsd.check_length(total, epoch)
    with raises_user_error("`warmup_epochs` 1", "`warmup_steps`"):
        Optimization(1e-3, warmup_epochs=1).check_length(100, math.inf)


def test_blr_is_scaled_by_the_global_batch():
    assert Optimization(blr=1.5e-4).rate(4096) == pytest.approx(2.4e-3)
    assert Optimization(1e-3).rate(4096) == 1e-3
    assert (Optimization().rate(4096), Optimization().warmup(5)) == (2e-4, 2500)


class NoLoader(Digits):
    """Data whose loader must not be made: it could move all images to a GPU once more."""

    def train_dataloader(self):
        raise AssertionError("a loader was made")


@pytest.mark.parametrize(
    ("limit", "max_epochs", "max_steps", "expected"),
    [
        (1.0, 3, -1, (44, 132)),
        (1.0, None, -1, (44, math.inf)),
        (1.0, -1, 100, (44, 100)),
        (0.25, 3, -1, (11, 33)),
        (5, 3, 20, (5, 15)),
    ],
)
def test_the_length_of_a_run_is_known_without_a_loader(limit, max_epochs, max_steps, expected):
    data = NoLoader(32)
    data.setup()
    trainer = SimpleNamespace(datamodule=data, limit_train_batches=limit, accumulate_grad_batches=1)
    trainer.max_epochs, trainer.max_steps = max_epochs, max_steps
    assert run_length(trainer) == expected
    assert data.count_train_batches() == len(Digits.train_dataloader(data)) == 44


def run(folder, optim, *callbacks, max_steps, ckpt_path=None, **options):
    """Return losses, weights and trainer of a run of 44 batches an epoch."""
    losses, task = Losses(), DiffusionTask(tiny_net(), optim=optim)
    trainer = tiny_trainer(folder, losses, *callbacks, max_steps=max_steps, log_every_n_steps=1, **options)
    trainer.fit(task, Digits(32), ckpt_path=ckpt_path)
    return losses.values, state(task), trainer


OPTIMIZERS = {
    "sgd": Optimization(0.1, optimizer="sgd", warmup_steps=2, decay_on="matrices"),
    "lars": Optimization(0.1, optimizer="lars", warmup_steps=2, weight_decay=1e-4, schedule="cosine"),
    "muon": Optimization(1e-3, optimizer="muon", momentum=0.95, warmup_steps=2, decay_on="matrices"),
    "torch.optim.NAdam": Optimization(
        1e-3, optimizer="torch.optim.NAdam", arguments={"momentum_decay": 1e-3}, warmup_steps=2, decay_on="matrices"
    ),
    "adamw": Optimization(betas=(0.9, 0.95), blr=8e-3, decay_on="layers", warmup_epochs=0.1, schedule="cosine"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_of_any_optimizer_resumes_exactly(tmp_path, name):
    def part(folder, **options):
        options |= {"max_steps": -1, "max_epochs": 2} if name == "adamw" else {"max_steps": 10}
        callback = LastCheckpoint(keep_every_n_steps=7)
        return run(tmp_path / folder, OPTIMIZERS[name], callback, limit_train_batches=5, **options)

    whole = part("whole")
    rest = part("rest", ckpt_path=tmp_path / "whole" / "checkpoints" / "step_00000007.ckpt")
    assert len(whole[0]) == 10
    assert rest[0] == whole[0][7:]
    assert same(rest[1], whole[1])
    assert whole[0][0] != whole[0][-1]


def test_the_rate_of_a_run_follows_from_its_batch_and_its_epochs(tmp_path, caplog):
    _, _, trainer = run(tmp_path, OPTIMIZERS["adamw"], StopAt(3), max_steps=44)
    find_line(caplog.text, "0.001 = blr 0.008 x", "32 / 256")
    assert "warning" not in caplog.text
    run(tmp_path, OPTIMIZERS["adamw"], max_steps=2)
    line = find_line(caplog.text, "step 2", "4.4 steps", "`warmup_epochs`")
    assert "warning" in line
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 3 / 4.4)


def test_a_cosine_ends_at_the_least_rate(tmp_path):
    optim = Optimization(1e-3, warmup_steps=1, schedule="cosine", min_lr=1e-5, decay_on="matrices")
    _, _, trainer = run(tmp_path, optim, max_steps=3)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([1e-5, 1e-5])


def test_muon_has_the_matrices_of_blocks_and_adamw_all_else(monkeypatch):
    """One step of each, by torch's own optimizers; torch's Muon computes in bfloat16."""
    monkeypatch.setattr(optimizers, "orthogonal_dtype", lambda device: torch.bfloat16)
    optim = Optimization(optimizer="muon", momentum=0.95, weight_decay=0.1)
    ours, theirs = tiny_net(), tiny_net()
    matrices = {n for n, p in theirs.named_parameters() if "_block" in n and p.ndim == 2}
    named = dict(theirs.named_parameters())
    parts = [
        torch.optim.Muon([named[n] for n in matrices], 1e-3, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for n, p in named.items() if n not in matrices], 1e-3, optim.betas, weight_decay=0.1),
    ]
    optimizer = optim.build(ours, 1e-3)
    for step in range(3):
        for net in (ours, theirs):
            torch.manual_seed(step)
            for parameter in net.parameters():
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for part in parts:
            part.step()
    assert len(matrices) == 3 * 4 + 1  # and the merge of the long skip
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], msg=name)
    with raises_user_error("muon", "matrices"):
        optim.build(Net(), 1e-3)


def test_muon_has_the_convolutions_of_a_resnets_blocks():
    net = ResNet(8, 1, width=4, num_classes=2, stem="cifar", pixels="unit")
    found = find_hidden_matrices(net)
    assert found == {name for name, p in net.named_parameters() if name.startswith("layer") and p.ndim == 4}
    assert {"layer1.0.conv1.weight", "layer2.0.downsample.0.weight"} < found
    assert "conv1.weight" not in found


@pytest.mark.parametrize("shape", [(24, 6), (6, 24), (16, 16), (8, 3, 2, 2)])
def test_muon_is_orthogonal_in_float32_on_a_cpu(shape):
    """Filters of a convolution are a matrix with a row for each output."""
    matrix = torch.nn.Parameter(torch.zeros(shape))
    matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert optimizers.orthogonal_dtype(matrix.device) == torch.float32
    optimizers.MatrixMuon([{"params": [matrix]}], lr=1.0, momentum=0.95).step()
    u, _, vh = torch.linalg.svd(matrix.grad.flatten(1), full_matrices=False)
    step = -matrix.detach().flatten(1) / (0.2 * math.sqrt(max(shape[0], math.prod(shape[1:]))))
    found = u.T @ step @ vh.T  # the singular values that the iterations leave
    torch.testing.assert_close(found, found.diag().diag(), atol=1e-4, rtol=0)
    assert 0.65 < found.diag().min() <= found.diag().max() < 1.25


def test_named_optimizers_have_the_settings_and_a_class_its_arguments():
    for name in ("lars", "sgd", "adamw"):
        optim = Optimization(optimizer=name, momentum=0.6, betas=(0.8, 0.7), weight_decay=0.1)
        (group,) = optim.build(Net(), 0.3).param_groups
        assert (group["lr"], group["weight_decay"]) == (0.3, 0.1)
        assert group["betas"] == (0.8, 0.7) if name == "adamw" else group["momentum"] == 0.6
    optim = Optimization(optimizer="torch.optim.NAdam", arguments={"betas": (0.5, 0.6)}, decay_on="matrices")
    optimizer = optim.build(Net(), 0.3)
    assert type(optimizer) is torch.optim.NAdam
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (0.3, 0.03, (0.5, 0.6)),
        (0.3, 0.0, (0.5, 0.6)),
    ]


@pytest.mark.parametrize(("flag", "stored", "ours"), [("optimizer", "sgd", "lars"), ("layer_decay", 0.5, 1.0)])
def test_the_state_of_an_optimizer_of_another_form_is_refused(tmp_path, flag, stored, ours):
    run(tmp_path, OPTIMIZERS["lars"], max_steps=1)
    contents = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    task = DiffusionTask(tiny_net(), optim=OPTIMIZERS["lars"])
    expected = (f"model.optim.{flag} {stored}", ours, f"`model.optim.{flag}` {stored}")
    for kind in ("uvit_decay.tasks.DiffusionTask", "mine.Task"):  # also of a task of another class, which may go on
        contents["settings"] = {f"model.optim.{flag}": stored, "model.class_path": kind}
        ours_all = {f"model.optim.{flag}": ours, "model.class_path": "uvit_decay.tasks.DiffusionTask"}
        task.settings, task.allowed = ours_all, ["all"]
        with raises_user_error(expected):
            check(contents, task, "x", trains=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blr": 0.0}, ("blr", "(0, inf)")),
        ({"lr": 1e-3, "blr": 1e-3}, ("`lr`", "`blr`")),
        ({"betas": (0.9, 1.0)}, ("betas", "[0, 1)")),
        ({"optimizer": "adam"}, ("`optimizer`", "torch.optim.NAdam")),
        ({"optimizer": "mine.Lion"}, ("`optimizer` mine.Lion", "--trust")),
        ({"optimizer": "torch.optim.NAdam", "arguments": {"beta": 1}}, ("`arguments`", "beta", 1)),
        ({"optimizer": "torch.optim.NAdam", "arguments": {"lr": 1}}, ("`arguments`", "`lr`")),
        ({"optimizer": "torch.optim.Rprop"}, ("torch.optim.Rprop", "weight_decay", "to 0")),
        (
            {"optimizer": "torch.optim.NAdam", "rate_over_gain": True},
            ("`rate_over_gain`", "torch.optim.NAdam"),
        ),
        ({"schedule": "wsd"}, ("wsd", "`cooldown`")),
    ],
)
def test_settings_out_of_range_are_one_line(options, message):
    with raises_user_error(message):
        Optimization(**options)
