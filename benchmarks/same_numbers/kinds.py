"""Compute the numbers of small networks with each kind of shortcut, by the `uvit_decay` that PYTHONPATH names.

    python kinds.py draw WEIGHTS                          initial weights: WEIGHTS/CASE.safetensors
    python kinds.py compute WEIGHTS FOLDER                numbers of each case: FOLDER/CASE PRECISION.safetensors
    python kinds.py compile WEIGHTS FOLDER                losses and gradients of a few cases, compiled block by block
    python kinds.py train CHECKOUT SETTINGS KINDS [FILE]  a run of train.py for each kind, from its checkpoint FILE

The program calls only what both checkouts have. Kinds that OLD lacks are not compared with anything, so that the kinds
are listed here, by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from uvit_decay.commands.train import main as run_train
from uvit_decay.decay import mixing_matrix
from uvit_decay.diffusion import DiffusionModel, Sampling, diffusion_loss, generate
from uvit_decay.diffusion.noise_path import VP, DDPMLinear, Linear
from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT
from uvit_decay.tasks.optim.options import Optimization
from uvit_decay.tasks.parallel.compilation import compile_net

FALLING = ("linear", "cosine", "learnable", "gain")  # kinds with an alpha_min
SHORTCUTS = (*FALLING, "constant", "constant-branch", "mp_sum", "depth_scaled", "layerscale", "rezero")
DEPTH_ATTENTION = ("attnres", "attnres-2", "attnres-4", "attnres-8", "dar")
TIMED = ("dar-t",)  # kinds that need the time of a denoiser
TRANSFORMERS_ONLY = ("gain", "depth_scaled", "layerscale", *DEPTH_ATTENTION)
COMPILED = ("dit learnable", "dit attnres-2")  # cases of blocks that share their graphs
STEPS = {"float32": 20, "bf16": 3}  # optimizer steps in each precision
BATCH, SIDE, CLASSES = 4, 8, 3
ALPHA_MIN = 0.6


@dataclass(frozen=True)
class Network:
    """A network whose shortcuts are varied.

    Args:
        build: function (further arguments) -> network.
        kinds: the kinds of shortcuts that it can have.
        loss: function (network, generator of its inputs) -> scalar loss.
        generation: noise path, prediction and sampler of a denoiser.
    """

    build: Callable[..., nn.Module]
    kinds: tuple[str, ...]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    generation: tuple[Any, str, str] | None = None


@dataclass(frozen=True)
class Case:
    """A network with one kind of shortcut.

    Args:
        network: a name in NETWORKS.
        arguments: arguments of the network, among them the kind of shortcut.
        optimizer: further options of the optimizer.
    """

    network: str
    arguments: dict[str, Any]
    optimizer: dict[str, Any] = field(default_factory=dict)


def build_uvit(**arguments: Any) -> nn.Module:
    fixed = {"init": "xavier", "zero_init": False}  # the default of zero_init is not the same in both
    return UViT(SIDE, 2, 3, dim=32, depth=4, heads=2, num_classes=CLASSES, **fixed, **arguments)


def build_sit(**arguments: Any) -> nn.Module:
    return SiT(SIDE, 2, 3, dim=32, depth=4, heads=2, num_classes=CLASSES, **{"wiring": "decayed", **arguments})


def build_dit(**arguments: Any) -> nn.Module:
    return build_sit(wiring="official", time="dit", learn_sigma=True, learned_variance=True, **arguments)


def build_mae(**arguments: Any) -> nn.Module:
    decoder = {"decoder_dim": 32, "decoder_depth": 2, "decoder_heads": 2}
    return MAE(SIDE, 2, 3, dim=32, depth=4, heads=2, wiring="decayed", **decoder, **arguments)


def build_vit(**arguments: Any) -> nn.Module:
    return ViT(SIDE, 2, 3, dim=32, depth=4, heads=2, num_classes=CLASSES, **arguments)


def build_resnet(**arguments: Any) -> nn.Module:
    return ResNet(SIDE, 3, width=4, depth=8, num_classes=CLASSES, stem="cifar", **arguments)


def draw_images(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images (b, 3, h, w) and labels (b,)."""
    images = torch.randn(BATCH, 3, SIDE, SIDE, generator=random).clamp(-1, 1)
    return images, torch.randint(CLASSES, (BATCH,), generator=random)


def denoiser_loss(net: nn.Module, random: torch.Generator) -> Tensor:
    x, y = draw_images(random)
    t, eps = torch.rand(BATCH, generator=random), torch.randn(x.shape, generator=random)
    if net.config.get("learned_variance"):
        return (net(x, t, y) - eps.repeat(1, 2, 1, 1)).square().mean()
    path, prediction = (Linear(), "velocity") if isinstance(net, SiT) else (VP(), "eps")
    return diffusion_loss(net, path, prediction, x, y, t, eps).mean()


def mae_loss(net: nn.Module, random: torch.Generator) -> Tensor:
    x, _ = draw_images(random)
    patches = net.pos_embed.shape[1] - 1
    return net.reconstruction_loss(x, *net(x, torch.rand(BATCH, patches, generator=random)))


def vit_loss(net: nn.Module, random: torch.Generator) -> Tensor:
    """Return the loss of a classifier with stochastic depth."""
    x, y = draw_images(random)
    branches = 2 * net.config["depth"]
    kept = torch.rand(branches, BATCH, generator=random) < 0.8
    return cross_entropy(net(x, kept / 0.8), y)


def resnet_loss(net: nn.Module, random: torch.Generator) -> Tensor:
    x, y = draw_images(random)
    return cross_entropy(net(x), y)


ALL = (*SHORTCUTS, *DEPTH_ATTENTION, *TIMED)
ENCODER_KINDS = tuple(kind for kind in ALL if kind not in TIMED)
RESNET_KINDS = tuple(kind for kind in SHORTCUTS if kind not in TRANSFORMERS_ONLY)
DROPPED_KINDS = ("linear", "learnable", "mp_sum", "layerscale", "rezero", "attnres-2", "dar")  # with stochastic depth
NETWORKS = {
    "uvit": Network(build_uvit, ALL, denoiser_loss, (VP(), "eps", "dpm++")),
    "sit": Network(build_sit, ALL, denoiser_loss, (Linear(), "velocity", "heun")),
    "dit": Network(build_dit, ALL, denoiser_loss, (DDPMLinear(), "eps", "dit-ddpm")),
    "mae": Network(build_mae, ENCODER_KINDS, mae_loss),
    "vit": Network(build_vit, DROPPED_KINDS, vit_loss),
    "resnet": Network(build_resnet, RESNET_KINDS, resnet_loss),
}


def list_cases() -> dict[str, Case]:
    """Return the cases by name: each kind in each network, then options that act together with the shortcuts."""
    cases = {}
    for name, network in NETWORKS.items():
        for kind in network.kinds:
            cases[f"{name} {kind}"] = Case(name, shortcut(kind))
    pairs = [[0.9 - 0.05 * k, 0.5 + 0.1 * k] for k in range(10)]
    muon = {"optimizer": "muon"}
    cases |= {
        "uvit numbers": Case("uvit", {"schedule": pairs}),
        "uvit attention only": Case("uvit", shortcut("linear", branches="attention", index="v2")),
        "uvit recomputed": Case("uvit", shortcut("learnable", checkpointing=True)),
        "uvit recomputed dar-t": Case("uvit", shortcut("dar-t", checkpointing=True)),
        "uvit stream": Case("uvit", shortcut("gain", skip_scale="stream")),
        "uvit gates": Case("uvit", shortcut("attnres-2", skip_scale="learned-each")),
        "uvit rms": Case("uvit", shortcut("depth_scaled", norm_type="rms", qk_norm=True)),
        "uvit rate over gain": Case("uvit", shortcut("linear"), {"rate_over_gain": True}),
        "uvit muon": Case("uvit", shortcut("layerscale"), muon),
        "uvit muon dar": Case("uvit", shortcut("dar"), muon),
        "sit concat": Case("sit", shortcut("gain", skip="concat", skip_scale="stream")),
        "sit concat attnres": Case("sit", shortcut("attnres-4", skip="concat", skip_scale="kappa:0.7")),
        "mae stream": Case("mae", shortcut("gain", skip_scale="stream")),
    }
    return cases


def shortcut(kind: str, **arguments: Any) -> dict[str, Any]:
    """Return the arguments of a network with a kind of shortcut."""
    return {"schedule": kind, "alpha_min": ALPHA_MIN if kind in FALLING else 1.0, **arguments}


def build(case: Case) -> nn.Module:
    """Return the network of a case with the weights that its constructor draws."""
    torch.manual_seed(0)
    return NETWORKS[case.network].build(**case.arguments)


def draw(weights: Path) -> None:
    """Write the initial weights of all cases."""
    for name, case in list_cases().items():
        save(weights / f"{name}.safetensors", build(case).state_dict())


def load(name: str, case: Case, weights: Path) -> nn.Module:
    """Return the network of a case with stored weights and noise in all parameters, so that no branch is silent."""
    net = build(case)
    state = load_file(weights / f"{name}.safetensors")
    random = torch.Generator().manual_seed(1)
    parameters = {key for key, parameter in net.named_parameters() if parameter.requires_grad}
    for key in sorted(state):
        if key in parameters:
            state[key] += 0.05 * torch.randn(state[key].shape, generator=random)
    net.load_state_dict(state)
    return net.train()


def compute(weights: Path, folder: Path) -> None:
    """Write the numbers of all cases in float32 and under autocast."""
    for name, case in list_cases().items():
        for precision in STEPS:
            net = load(name, case, weights)
            found = train_network(net, case, precision)
            found |= evaluate(net.eval(), NETWORKS[case.network], precision)
            save(folder / f"{name} {precision}.safetensors", found)


def train_network(net: nn.Module, case: Case, precision: str) -> dict[str, Tensor]:
    """Train a network, and return its losses, the gradients of the first step and the state after the last one."""
    optim = Optimization(lr=1e-3, **case.optimizer)
    optimizer = optim.build(net, optim.lr)
    random = torch.Generator().manual_seed(2)
    found, losses = {}, []
    for step in range(STEPS[precision]):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = NETWORKS[case.network].loss(net, random)
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            found |= gradients(net)
        optimizer.step()
        optimizer.zero_grad()
    found["losses"] = torch.stack(losses)
    for name, value in net.state_dict().items():
        found[f"state.{name}"] = value
    for index, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            found[f"optimizer.{index}.{name}"] = value
    for index, group in enumerate(optimizer.param_groups):
        found[f"group.{index}"] = torch.tensor([group["lr"], group["weight_decay"], len(group["params"])])
    return found


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters that have one."""
    parameters = net.named_parameters()
    return {f"gradient.{name}": parameter.grad for name, parameter in parameters if parameter.grad is not None}


@torch.no_grad()
def evaluate(net: nn.Module, network: Network, precision: str) -> dict[str, Tensor]:
    """Return the states that probes read and, of a denoiser, images and the mixing matrix."""
    x, y = draw_images(torch.Generator().manual_seed(3))
    inputs = (x,)
    found = {}
    if network.generation is not None:
        inputs = (x, torch.linspace(0.1, 0.9, BATCH), y)
        path, prediction, sampler = network.generation
        model = DiffusionModel.from_net(net, path, prediction, torch.device("cpu"))
        sampling = Sampling(sampler, steps=3, guidance=1.5, precision=precision)
        found["images"] = generate(model, sampling, [0, 5], [0, 2], seed=4)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for layer, state in enumerate(net.forward_intermediates(*inputs)):
            found[f"layer.{layer}"] = state
        if network.generation is not None:
            found["mixing"] = mixing_matrix(net, *inputs)
    return found


def compute_compiled(weights: Path, folder: Path) -> None:
    """Write the loss and the gradients of networks whose blocks are compiled, in float32."""
    cases = list_cases()
    for name in COMPILED:
        net = load(name, cases[name], weights)
        compile_net(net, "inductor", by_block=True)
        loss = denoiser_loss(net, torch.Generator().manual_seed(2))
        loss.backward()
        save(folder / f"{name}.safetensors", {"loss": loss.detach(), **gradients(net)})


def train(checkout: str, settings: str, kinds: str, checkpoint: str | None = None) -> None:
    """Train a network for each of `kinds`, with commas between them, as train.py does.

    A run continues from the file `checkpoint` of its folder, if it is given.
    """
    for kind in kinds.split(","):
        network = {"dim": 32, "depth": 4, "heads": 2, **shortcut(kind)}
        words = ["fit", "--config", f"{checkout}/configs/digits.yaml", "--config", settings]
        words += ["--trainer.logger.init_args.experiment", kind]
        for name, value in network.items():
            words += [f"--model.net.{name}", str(value)]
        if checkpoint is not None:
            words += ["--ckpt_path", f"runs/{kind}/version_0/checkpoints/{checkpoint}"]
        run_train(words)


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().clone().contiguous() for name, value in tensors.items()}, path)


def main(action: str, *arguments: str) -> None:
    """Run one of the actions."""
    torch.set_num_threads(1)
    if action == "train":
        train(*arguments)
    else:
        actions = {"draw": draw, "compute": compute, "compile": compute_compiled}
        actions[action](*map(Path, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
