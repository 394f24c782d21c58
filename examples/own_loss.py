"""Train with your own auxiliary loss in addition to the diffusion loss: `python examples/own_loss.py`.

The loss keeps the root mean square of each patch token of the middle block near 1.
"""

import argparse

from lightning.pytorch import Trainer
from torch import Tensor

import uvit_decay
from uvit_decay.data import Digits
from uvit_decay.data.batches import Batch
from uvit_decay.tasks import AuxiliaryLoss, Optimization


class UnitLength(AuxiliaryLoss):
    """Mean squared difference between the root mean square of each patch token and 1."""

    def forward(self, states: dict[str, Tensor], batch: Batch, times: Tensor | None) -> Tensor:
        losses = []
        for state in states.values():
            patches = state[:, self.num_prefix_tokens :].float()
            length = patches.square().mean(dim=-1).sqrt()
            losses.append((length - 1).square().mean())
        return sum(losses) / len(losses)


def main(steps: int) -> None:
    net = uvit_decay.UViT(
        image_size=8, patch_size=2, channels=1, dim=64, depth=4, heads=2, num_classes=10, alpha_min=0.7, init="xavier"
    )
    task = uvit_decay.DiffusionTask(
        net,
        optim=Optimization(lr=2e-3, warmup_steps=20),
        auxiliary=[UnitLength(layers=["mid_block"], weight=0.1)],
    )
    trainer = Trainer(accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, log_every_n_steps=1)
    trainer.fit(task, Digits(batch_size=32))
    for name in ("train/loss", "train/aux/unitlength"):
        print(f"{name} {trainer.callback_metrics[name].item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
