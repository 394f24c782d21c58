"""Write the archive of a version with the uvit_decay that is imported: python tests/written/write.py 0.2.0.tar.xz.

Real commands write the files, made small: runs of a U-ViT, of a SiT on latents and of an MAE, an exported file, a
folder for diffusers, latents, statistics, and what the networks yield (expected.npz). tests/test_written.py reads them.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from contextlib import chdir
from pathlib import Path

import numpy as np
import torch
import yaml
from diffusers import AutoencoderKL
from PIL import Image

from uvit_decay.__main__ import main
from uvit_decay.checkpoint import load

OPTIM = {"lr": 1e-3, "warmup_steps": 1, "schedule": "constant"}
SMALL = {"dim": 8, "depth": 2, "heads": 2, "alpha_min": 0.7}
STEPS, RESUMED = 4, 6  # of the stored runs, and of the runs that continue them


def callback(name: str, **arguments: object) -> dict[str, object]:
    """Return a callback of this package as a configuration has it."""
    return {"class_path": f"uvit_decay.callbacks.{name}", "init_args": arguments}


def trainer(name: str, *callbacks: dict[str, object]) -> dict[str, object]:
    """Return the settings of the trainer for a run of four steps."""
    sizes = {"max_steps": STEPS, "limit_val_batches": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    device = {"accelerator": "cpu", "devices": 1, "precision": "32-true", "enable_progress_bar": False}
    logger = callback("RunLogger", experiment=name)
    kept = [callback("EMA", decay=0.9), *callbacks, callback("LastCheckpoint", every_n_steps=2)]
    return {**sizes, **device, "enable_model_summary": False, "logger": logger, "callbacks": kept}


def part(class_path: str, **arguments: object) -> dict[str, object]:
    """Return an object of this package as a configuration has it."""
    return {"class_path": f"uvit_decay.{class_path}", "init_args": arguments}


def uvit() -> dict[str, object]:
    """Return the configuration of a U-ViT of digits with every history."""
    net = part("nn.UViT", image_size=8, patch_size=2, channels=1, num_classes=10, init="xavier", **SMALL)
    classifier = part("encoders.SmallClassifier")
    callbacks = [
        callback("GenerationMetrics", extractor=classifier, num=70, metrics=["fd", "is"], every_n_steps=2),
        callback("LinearProbes", every_n_steps=2, max_train=100, max_test=50),
        callback("BranchNorms", every_n_steps=1),
    ]
    sampling = {"sampler": "dpm++", "steps": 3, "guidance": 2.0}
    model = part("tasks.DiffusionTask", net=net, sampling=sampling, optim=OPTIM)
    return {"trainer": trainer("uvit", *callbacks), "model": model, "data": part("data.Digits", batch_size=16)}


def sit(latents: Path) -> dict[str, object]:
    """Return the configuration of a SiT of these latents."""
    net = part("nn.SiT", image_size=2, patch_size=1, channels=4, num_classes=2, wiring="decayed", **SMALL)
    path = part("diffusion.noise_path.Linear")
    sampling = {"sampler": "sit-ode", "steps": 3, "guidance": 1.5}
    model = part("tasks.DiffusionTask", net=net, path=path, prediction="velocity", sampling=sampling, optim=OPTIM)
    data = part("data.Latents", path=str(latents), batch_size=4, num_workers=0)
    return {"trainer": trainer("sit"), "model": model, "data": data}


def mae() -> dict[str, object]:
    """Return the configuration of an MAE of digits."""
    decoder = {"decoder_dim": 8, "decoder_depth": 2, "decoder_heads": 2}
    net = part("nn.MAE", image_size=8, patch_size=2, channels=1, pixels="unit", wiring="decayed", **SMALL, **decoder)
    model = part("tasks.MAETask", net=net, mask_ratio=0.5, optim=OPTIM)
    return {"trainer": trainer("mae"), "model": model, "data": part("data.Digits", batch_size=16)}


def run(folder: Path, *words: object) -> None:
    """Run a command of this package in a folder."""
    sys.argv = ["uvit-decay", *map(str, words)]
    with chdir(folder):
        main()


def encode(folder: Path, latents: Path) -> None:
    """Encode six small images of two classes with a small autoencoder that is not kept."""
    random = np.random.default_rng(0)
    for number in range(6):
        file = folder / "images" / ("cat", "dog")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(4, 4, 3), dtype=np.uint8)).resize((16, 16)).save(file)
    torch.manual_seed(0)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    widths = {"block_out_channels": [8] * 4, "layers_per_block": 1, "norm_num_groups": 4}
    AutoencoderKL(**kinds, **widths, latent_channels=4).save_pretrained(folder / "vae")
    sizes = ["--image-size", 16, "--shard-size", 4, "--batch-size", 3, "--workers", 0]
    run(folder, "encode", folder / "images", latents, "--vae", folder / "vae", *sizes)


def train(config: dict[str, object], folder: Path, kept: Path) -> None:
    """Train, keep the files of the run, and keep the checkpoint of a run that continues it as resumed.ckpt."""
    folder.mkdir()
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"seed_everything": 0, **config}))
    run(folder, "train", "fit", "--config", file)
    (before,) = folder.rglob("last.ckpt")
    version = before.parents[1]
    kept.mkdir()
    shutil.copy(before, kept)
    for name in ("config.yaml", "metrics.csv", "probes.jsonl", "generation.jsonl", "branches.jsonl"):
        if (version / name).exists():
            shutil.copy(version / name, kept)
    run(folder, "train", "fit", "--config", file, "--ckpt_path", before, "--trainer.max_steps", RESUMED)
    after = max(folder.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime)
    shutil.copy(after, folder / "resumed.ckpt")


def inputs(name: str) -> tuple[torch.Tensor, ...]:
    """Return fixed arguments of the network of a run: images, with times and labels or the noise of the mask."""
    if name == "mae":
        return torch.linspace(-1, 1, 128).reshape(2, 1, 8, 8), torch.linspace(0, 1, 32).reshape(2, 16)
    shape, null = ((2, 1, 8, 8), 10) if name == "uvit" else ((2, 4, 2, 2), 2)
    x = torch.linspace(-1, 1, 2 * shape[1] * shape[2] * shape[3]).reshape(shape)
    return x, torch.tensor([0.2, 0.9]), torch.tensor([1, null])


@torch.no_grad()
def output(name: str, checkpoint: Path, weights: str) -> np.ndarray:
    """Return what a network of a file yields for `inputs`, float32 (2, ...)."""
    out = load(checkpoint, weights).net(*inputs(name))
    return (out[0] if name == "mae" else out).numpy()


def write(target: Path, folder: Path) -> None:
    """Write all files into `target`; `folder` is for what is not kept."""
    latents = target / "latents"
    encode(folder, latents)
    expected = {}
    for name, config in {"uvit": uvit(), "sit": sit(latents), "mae": mae()}.items():
        train(config, folder / name, target / name)
        stored, resumed = target / name / "last.ckpt", folder / name / "resumed.ckpt"
        expected |= {f"{name}_{weights}": output(name, stored, weights) for weights in ("raw", "ema")}
        expected[f"{name}_resumed"] = output(name, resumed, "raw")
    run(folder, "export", target / "uvit" / "last.ckpt", target / "uvit.safetensors")
    run(folder, "export", target / "uvit" / "last.ckpt", target / "diffusers", "--to", "diffusers")
    run(folder, "sample", "--ckpt", target / "uvit.safetensors", "--num", 20, "--out", folder / "samples.npz")
    expected["samples"] = np.load(folder / "samples.npz")["arr_0"]
    np.savez_compressed(target / "expected.npz", **expected)
    run(folder, "evaluate", "statistics", "digits:test", "--features", "digits", "--out", target / "statistics.npz")


if __name__ == "__main__":
    archive = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as files:
        write(Path(files), Path(work))
        with tarfile.open(archive, "w:xz") as target:
            target.add(files, ".")
