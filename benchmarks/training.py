"""Training steps: loss, backward, optimizer, schedule and EMA, ours as the tasks do it, and plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.cases import Agreement, Case, Compared, Setting
from benchmarks.measuring import Run, model_flops
from benchmarks.plain.training import Step, eps_loss, velocity_loss
from uvit_decay.callbacks import EMA
from uvit_decay.data.batches import Batch
from uvit_decay.diffusion.noise_path import VP, Linear
from uvit_decay.diffusion.prediction import diffusion_loss
from uvit_decay.nn import MAE, SiT, UViT
from uvit_decay.runtime.precision import trains_in_bf16
from uvit_decay.tasks import DiffusionTask, MAETask
from uvit_decay.tasks.base import Optimization, Task
from uvit_decay.tasks.own_parameters import own_parameters

OPTIM = Optimization(lr=2e-4)
TOLERANCES = {"float32": 1e-3, "bf16": 0.1}  # of the gradients, relative to their norm


@dataclass(frozen=True)
class Size:
    """A network to train: its name, how it is built, the batch and the most pairs."""

    name: str
    build: Callable[[], UViT | SiT | MAE]
    batch: int
    pairs: int


def sizes(setting: Setting) -> list[Size]:
    """Return the networks of this setting; SiT-XL/2 is cut on CPUs, where two of it in training need 28 GB."""
    if setting.quick:
        return [
            Size("width 64, 17 tokens", partial(networks.small, 64), 4, 2),
            Size("SiT of width 64", networks.tiny_sit, 2, 2),
            Size("MAE of width 64", networks.tiny_mae, 2, 2),
        ]
    depth = setting.size(cpu=8, gpu=28, quick=2)
    cut = "" if depth == 28 else f", {depth} of 28 blocks"
    return [
        Size("uvit-s/2, 32x32x3", networks.uvit_s, setting.size(8, 128, 2), 7),
        Size("uvit-m/2, 32x32x4", networks.uvit_m, setting.size(2, 64, 2), 7),
        Size(f"sit-xl/2, 32x32x4{cut}", partial(networks.sit_xl, depth), setting.size(2, 32, 2), 7),
        Size("mae-b/16, 224x224", networks.mae_b, setting.size(8, 128, 2), 7),
        Size("width 64, 17 tokens", partial(networks.small, 64), setting.size(32, 512, 2), 21),
        Size("width 128, 65 tokens", partial(networks.small, 128), setting.size(32, 512, 2), 11),
        Size("width 192, 65 tokens", partial(networks.small, 192), setting.size(32, 512, 2), 7),
    ]


def cases(setting: Setting) -> Iterator[Case]:
    """Yield a case for each network; float32, bf16, and our default precision against float32."""
    for size in sizes(setting):
        yield step_case(size, setting)


class OurStep:
    """The training step of a task: what Lightning calls between two batches, without Lightning's own work."""

    def __init__(self, task: Task, batch: Batch, device: torch.device) -> None:
        self.task, self.batch, self.device = task, batch, device.type
        self.optimizer = task.optim.build(task.net, task.optim.lr, own_parameters(task))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: task.optim.factor(step, 1))
        self.ema, self.trainer = EMA(ramp=False), SimpleNamespace(global_step=0)
        self.ema.on_fit_start(self.trainer, task)
        self.ema.on_train_start(self.trainer, task)

    def loss(self) -> Tensor:
        """Return the loss of the batch."""
        return self.task.loss(self.batch, "train")

    def __call__(self, autocast: bool) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.trainer.global_step += 1
        self.ema.on_train_batch_end(self.trainer, self.task, None, self.batch, 0)


def task_of(net: UViT | SiT | MAE) -> Task:
    """Return the task of the configurations that train such a network."""
    if isinstance(net, MAE):
        return MAETask(net, optim=OPTIM)
    if isinstance(net, SiT):
        return DiffusionTask(net, Linear(), "velocity", optim=OPTIM)
    return DiffusionTask(net, VP(), "eps", optim=OPTIM)


def images(net: UViT | SiT | MAE, batch: int, device: torch.device | str) -> Batch:
    """Return a batch of random images with labels."""
    x = torch.randn(batch, net.channels, net.image_size, net.image_size, device=device).clamp(-1, 1)
    return Batch(x, torch.arange(batch, device=device) % max(net.num_classes, 1), 0, 0, batch)


def plain_loss(kind: type[nn.Module], net: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a plain network, which draws its random numbers from torch's generator."""
    x, device = batch.images, batch.images.device
    if kind is MAE:
        return net(x, torch.rand(len(x), net.pos_embed.shape[1] - 1, device=device))
    t, eps = torch.rand(len(x), device=device), torch.randn_like(x)
    if kind is SiT:
        return velocity_loss(net, x, dropped(net.y_embedder.embedding_table, batch.labels), t, eps)
    return eps_loss(net, x, None if net.label_emb is None else dropped(net.label_emb, batch.labels), t, eps)


def dropped(table: nn.Embedding, labels: Tensor) -> Tensor:
    """Return the labels, a tenth of them replaced by the last row."""
    return torch.where(torch.rand(len(labels), device=labels.device) < 0.1, table.num_embeddings - 1, labels)


def step_case(size: Size, setting: Setting) -> Case:
    """Build both sides of a training step."""
    net, reference = networks.both(size.build(), setting)
    batch = images(net, size.batch, setting.device)
    agreements = {precision: agreement(net, reference, batch, precision) for precision in TOLERANCES}
    task = task_of(net).train()
    ours = OurStep(task, batch, setting.device)
    theirs = Step(reference.train(), partial(plain_loss, type(net), reference, batch), 2e-4, OPTIM.betas, 0.03)
    runs: dict[str, Run] = {}
    for precision in TOLERANCES:
        runs[f"plain {precision}"] = partial(theirs, precision == "bf16")
        runs[precision] = partial(ours, precision == "bf16")
    compared = [Compared(p, p, f"plain {p}", agreements[p], rate=p) for p in TOLERANCES]
    if setting.compiled:
        second = OurStep(
            task_of(networks.compiled(networks.both(size.build(), setting)[0])).train(), batch, setting.device
        )
        for p in TOLERANCES:
            runs[f"{p} compiled"] = partial(second, p == "bf16")
            compared.append(Compared(p, f"{p} compiled", f"plain {p}", agreements[p], compiled=True, rate=p))
    chosen = default_precision(net, setting.device)
    compared.append(Compared(f"default ({chosen})", chosen, "plain float32", agreements[chosen], rate=chosen))
    held = dict.fromkeys(runs, held_bytes(net))
    return Case(f"train {size.name}", size.batch, runs, compared, size.pairs, flops(net, size.batch), held)


def held_bytes(net: nn.Module) -> int:
    """Return the bytes that training holds between steps: weights, two moments and an average."""
    return sum(4 * p.numel() * (4 if p.requires_grad else 2) for p in net.parameters())


def default_precision(net: UViT | SiT | MAE, device: torch.device) -> str:
    """Return the precision in which train.py trains this network here if none is asked for."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "float32"
    return "bf16" if trains_in_bf16(net.dim) else "float32"


def flops(net: UViT | SiT | MAE, batch: int) -> int:
    """Return the FLOPs of the plain network, forward and backward, counted on the meta device."""
    with torch.device("meta"):
        reference = networks.plain_of(net)
        return model_flops(lambda: plain_loss(type(net), reference, images(net, batch, "meta")).backward())


def agreement(net: UViT | SiT | MAE, reference: nn.Module, batch: Batch, precision: str) -> Agreement:
    """Return how far the gradients of both sides are apart, of one image and the same random numbers."""
    x, y = batch.images[:1], batch.labels[:1] if net.num_classes else None
    t, eps = torch.full((1,), 0.3, device=x.device), torch.randn_like(x)
    noise = torch.rand(1, net.patch_embed.tokens if isinstance(net, MAE) else 1, device=x.device)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        if isinstance(net, MAE):
            ours, theirs = net.reconstruction_loss(x, *net(x, noise)), reference(net.scale.normalise(x), noise)
        elif isinstance(net, SiT):
            ours = diffusion_loss(net, Linear(), "velocity", x, y, t, eps).mean()
            theirs = velocity_loss(reference, x, y, 1 - t, eps)
        else:
            ours = diffusion_loss(net, VP(), "eps", x, y, t, eps).mean()
            theirs = eps_loss(reference, x, y, t, eps)
    named = dict(net.named_parameters())
    trained = [name for name, p in reference.named_parameters() if p.requires_grad]
    mine = torch.autograd.grad(ours, [named[name] for name in trained], materialize_grads=True)
    wanted = torch.autograd.grad(theirs, [reference.get_parameter(name) for name in trained], materialize_grads=True)
    off = torch.nn.utils.get_total_norm([a - b for a, b in zip(mine, wanted, strict=True)])
    relative = float(off / torch.nn.utils.get_total_norm(wanted)) + abs(float((ours / theirs).detach()) - 1)
    return Agreement(relative, TOLERANCES[precision])
