"""Train a SiT with Lightning and your own DataLoader, then sample from it: `python examples/lightning_script.py`."""

import argparse

import torch
from lightning.pytorch import Trainer
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import uvit_decay
from uvit_decay.diffusion import Linear, Sampling
from uvit_decay.pictures import labelled_grid
from uvit_decay.tasks import Optimization


def main(steps: int) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (n, 1, 8, 8) in [-1, 1]
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True, drop_last=True)

    net = uvit_decay.SiT(
        image_size=8,
        patch_size=2,
        channels=1,
        dim=64,
        depth=4,
        heads=2,
        num_classes=10,
        wiring="decayed",
        alpha_min=0.8,
    )
    task = uvit_decay.DiffusionTask(
        net,
        path=Linear(),
        prediction="velocity",
        sampling=Sampling("euler", 12, guidance=2.0),
        optim=Optimization(lr=2e-3, warmup_steps=20),
    )
    trainer = Trainer(accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False)
    trainer.fit(task, loader)
    trainer.save_checkpoint("sit.ckpt")

    task = uvit_decay.DiffusionTask.load_from_checkpoint("sit.ckpt")
    samples = uvit_decay.Samples(task.source(), task.sampling, "raw", classes=range(10))
    labelled_grid(samples.images(range(20)), columns=10).save("sit.png")
    print("wrote sit.ckpt and sit.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
