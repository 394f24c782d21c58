"""Two processes that hold half of everything train, look, save and resume as two, or one, that hold it all."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Losses, leaves, same, sample, tiny_task, tiny_trainer
from gloo import on_two_processes
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from PIL import Image
from runs import StopAt
from small_mae import mae_task
from small_vit import fine_tuning

from uvit_decay.callbacks import EMA, GenerationMetrics, LinearProbes, Preview
from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.encoders import SmallClassifier
from uvit_decay.nn import SiT
from uvit_decay.runs import history
from uvit_decay.tasks.parallel.sharding import Sharded, local_shard

STEPS, HALF = 4, 2
pytestmark = pytest.mark.slow


def sit_task(compile=False, **options):
    torch.manual_seed(0)
    net = SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10, alpha_min=0.8, wiring="decayed", **options)
    return tiny_task(net, path=Linear(), prediction="velocity", compile=compile)


# How the task of shards, and if that is another the task of DDP, is made, and options of the run.
VARIANTS = {
    "sit": ([sit_task], {}),
    "sit-pieces": (
        [partial(sit_task, checkpointing=True, schedule="learnable", qk_norm=True, norm_type="rms")],
        {"device_batch_size": 8, "gradient_clip_val": 0.05},
    ),
    "sit-bf16": ([partial(sit_task, checkpointing=True)], {"precision": "bf16-mixed"}),
    "mae": ([mae_task], {"precision": "bf16-mixed"}),
    "fine-tuning": ([fine_tuning], {}),
    "sit-compiled": ([partial(sit_task, "aot_eager"), sit_task], {}),
}
EXHAUSTIVE = {"sit-bf16", "sit-compiled"}


class Held(Callback):
    """The number of bytes that this process holds for a step: memory itself, not views of it."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer, task, optimizer) -> None:
        self._count("gradients", (p.grad for p in task.net.parameters() if p.grad is not None))

    def on_train_end(self, trainer, task) -> None:
        ema = next(callback for callback in trainer.callbacks if isinstance(callback, EMA))
        self._count("weights", task.net.parameters())
        self._count("average", ema.shadow.values())
        for key in ("exp_avg", "exp_avg_sq"):
            self._count(key, (state[key] for state in trainer.optimizers[0].state.values()))

    def _count(self, name, tensors) -> None:
        blocks = [local_shard(tensor).untyped_storage() for tensor in tensors]
        self.bytes[name] = sum({block.data_ptr(): block.nbytes() for block in blocks}.values())


def save(trainer, *_):
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "validation.ckpt", weights_only=False)


def fit(folder, task, *callbacks, device_batch_size=None, ckpt_path=None, **options):
    losses, held, data = Losses(), Held(), Digits(32)
    data.device_batch_size = device_batch_size
    trainer = tiny_trainer(
        folder, losses, EMA(0.9), held, *callbacks, max_steps=STEPS, log_every_n_steps=HALF, **options
    )
    trainer.fit(task, data, ckpt_path=ckpt_path)
    norm = float(trainer.callback_metrics.get("train/grad_norm", 0.0))
    return {"losses": losses.values, "held": held.bytes, "norm": norm}


def looking():
    every = {"every_n_steps": STEPS - 1, "at_end": False}
    generation = GenerationMetrics(SmallClassifier(), num=75, batch_size=20, **every)
    probes = LinearProbes(times=(0.1, 0.3, 0.5), max_train=100, max_test=50, **every)
    return Preview(rows=1, columns=1, **every), generation, probes, LambdaCallback(on_validation_batch_end=save)


LOOKING = {"limit_val_batches": 2, "val_check_interval": HALF, "check_val_every_n_epoch": None}


def work(folder: Path, exhaustive: bool, rank: int) -> dict[str, dict]:
    found = {}

    def run(name, task, *callbacks, strategy="fsdp", **options) -> None:
        kind = Sharded() if strategy == "fsdp" else strategy
        place = f"{name} {strategy}"
        found[place] = fit(folder / place, task, *callbacks, devices=2, strategy=kind, **options)

    for name, (makers, options) in VARIANTS.items():
        if name in EXHAUSTIVE and not exhaustive:
            continue
        run(name, makers[0](), **options)
        run(name, makers[-1](), strategy="ddp", **options)
    for strategy in ("fsdp", "ddp"):
        run("looking", sit_task(), *looking(), strategy=strategy, **LOOKING)
    other = sit_task()
    with torch.no_grad():
        other.net.pos_embed.add_(rank)
    run("half", other, StopAt(HALF))
    run("rest", sit_task(), ckpt_path=folder / "half fsdp" / "checkpoints" / "last.ckpt")
    run("rest of one", sit_task(), ckpt_path=folder / "half of one" / "checkpoints" / "last.ckpt")
    return found


@pytest.fixture(scope="module")
def runs(programs, tmp_path_factory, exhaustive):
    """Return the folder of all runs, and what each rank saw of them."""
    folder = tmp_path_factory.mktemp("runs")
    fit(folder / "half of one", sit_task(), StopAt(HALF))
    return folder, on_two_processes(programs, partial(work, folder, exhaustive), folder)


def checkpoint(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def read_training_state(folder):
    """Return the contents of a checkpoint without Lightning's counts, which differ in a resumed run."""
    contents = checkpoint(folder)
    return {name: contents[name] for name in ("state_dict", "callbacks", "optimizer_states", "lr_schedulers")}


def assert_close(found, wanted, atol):
    """Check that two checkpoints have equal keys, types and shapes, and numbers that differ only by rounding."""
    found, wanted = dict(leaves(found)), dict(leaves(wanted))
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
        else:
            assert found[name] == value, name


@pytest.fixture(params=VARIANTS)
def name(request, exhaustive) -> str:
    """Return one of the variants that were run."""
    if request.param in EXHAUSTIVE and not exhaustive:
        pytest.skip("with --exhaustive")
    return request.param


def test_shards_train_the_network_that_ddp_trains(runs, name):
    folder, ranks = runs
    atol = 2e-3 if "bf16" in name else 2e-5
    for rank in ranks:
        found, wanted = rank[f"{name} fsdp"], rank[f"{name} ddp"]
        assert found["losses"] == pytest.approx(wanted["losses"], rel=atol)
        assert found["norm"] == pytest.approx(wanted["norm"], rel=10 * atol)
        assert wanted["norm"] > 0
    assert_close(checkpoint(folder / f"{name} fsdp"), checkpoint(folder / f"{name} ddp"), atol)


def test_each_process_holds_half(runs, name):
    _, ranks = runs
    for part, count in ranks[0][f"{name} ddp"]["held"].items():
        shares = [rank[f"{name} fsdp"]["held"][part] for rank in ranks]
        assert sum(shares) == pytest.approx(count, rel=0.05)
        assert max(shares) < 0.6 * count


def test_shards_train_the_network_that_one_process_trains(runs, tmp_path):
    _, ranks = runs
    one = fit(tmp_path, sit_task())["losses"]
    mean = np.mean([rank["sit fsdp"]["losses"] for rank in ranks], axis=0)
    assert mean == pytest.approx(np.array(one), rel=1e-5)


def test_the_checkpoint_is_one_that_is_sampled_from(runs):
    folder, _ = runs
    loaded = load(folder / "sit fsdp" / "checkpoints" / "last.ckpt")
    assert loaded.card.weights == "ema"
    assert type(loaded.net) is SiT
    assert same(dict(loaded.net.named_parameters()), checkpoint(folder / "sit fsdp")["callbacks"]["EMA"]["shadow"])


def test_a_resumed_run_is_the_run_that_was_not_stopped(runs):
    folder, ranks = runs
    for rank in ranks:
        assert rank["rest fsdp"]["losses"] == rank["sit fsdp"]["losses"][HALF:]
        assert rank["rest fsdp"]["held"] == rank["sit fsdp"]["held"]
    assert_close(read_training_state(folder / "rest fsdp"), read_training_state(folder / "sit fsdp"), 0)


def test_shards_go_on_where_one_process_stopped_and_one_where_shards_did(runs, tmp_path):
    folder, ranks = runs
    for rank in ranks:
        assert rank["rest of one fsdp"]["losses"] == pytest.approx(rank["sit ddp"]["losses"][HALF:], rel=2e-5)
    wanted = read_training_state(folder / "sit ddp")
    assert_close(read_training_state(folder / "rest of one fsdp"), wanted, 2e-5)
    fit(tmp_path, sit_task(), ckpt_path=folder / "half fsdp" / "checkpoints" / "last.ckpt")
    assert_close(read_training_state(tmp_path), wanted, 2e-5)


def test_looking_with_unequal_shares_shows_the_same_and_changes_nothing(runs):
    folder, ranks = runs
    for rank in ranks:
        assert rank["looking fsdp"]["losses"] == rank["sit fsdp"]["losses"]
    assert same(checkpoint(folder / "looking fsdp")["state_dict"], checkpoint(folder / "sit fsdp")["state_dict"])
    places = [folder / f"looking {strategy}" for strategy in ("fsdp", "ddp")]
    found, wanted = (history.read(place / "generation.jsonl") for place in places)
    assert len(found) == len(wanted) == 1
    assert [entry.values["fd"] for entry in found] == pytest.approx([entry.values["fd"] for entry in wanted], rel=1e-3)
    images = [np.asarray(Image.open(place / "samples.png")).astype(int) for place in places]
    assert abs(images[0] - images[1]).max() <= 1
    tables = [np.genfromtxt(place / "probes.csv", delimiter=",", skip_header=1)[:, 7] for place in places]
    assert tables[0] == pytest.approx(tables[1], rel=1e-3)
    saved = [torch.load(place / "validation.ckpt", weights_only=True) for place in places]
    assert_close(*saved, 2e-5)


def test_weights_start_as_process_0_has_them(runs):
    _, ranks = runs
    for rank in ranks:
        assert rank["half fsdp"]["losses"] == rank["sit fsdp"]["losses"][:HALF]


def test_fsdp_is_a_flag_and_leaves_a_checkpoint_that_is_sampled_from(programs, tmp_path, monkeypatch):
    flags = ["--trainer.strategy=fsdp", "--trainer.devices=2", "--trainer.max_steps=3", "--trainer.limit_val_batches=0"]
    small = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=uvit_decay.callbacks.LastCheckpoint"]
    programs.run_ranks(2, "train.py", "fit", *flags, *small, cwd=tmp_path)
    run = tmp_path / "runs" / "digits" / "version_0"
    assert "strategy: fsdp\n" in (run / "config.yaml").read_text()
    sample(monkeypatch, tmp_path, "--ckpt", run / "checkpoints" / "last.ckpt", "--num", "2", "--steps", "2")
