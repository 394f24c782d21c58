"""Small real parts: networks, tasks and trainers that run in a second."""

from __future__ import annotations

import copy
import gc
import logging
import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
import yaml
from disks import Disk
from latent_files import COUNT, encode
from lightning.pytorch import Callback, Trainer
from PIL import Image
from programs import Launcher
from small_mae import mae_task
from small_programs import SmallPrograms, small_inputs
from threadpoolctl import threadpool_limits

from uvit_decay.callbacks import EMA, LastCheckpoint
from uvit_decay.data import Digits
from uvit_decay.data.named import SETS
from uvit_decay.decay import SHORTCUTS
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.encoders import small_classifier
from uvit_decay.encoders.table import EXTRACTORS
from uvit_decay.evaluation.metric_table import METRICS
from uvit_decay.nn import MAE, ResNet, SiT, UViT, ViT
from uvit_decay.representations.probe_protocols import PROTOCOLS
from uvit_decay.tasks import DiffusionTask
from uvit_decay.tasks.base import Optimization

ROOT = Path(__file__).resolve().parent.parent
CLASSIFIERS: dict[tuple, torch.nn.Module] = {}  # of `trained_once`
# Lightning stops this where nobody listens when it is imported, as in pytest 8.0: `caplog` would be empty.
logging.getLogger("lightning.pytorch").propagate = True
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of programs that tests start; `one_thread` is for this process
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is not there must fail at once, not after a timeout


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="all faults and hostile files, not a sample: make faults"
    )


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Spread the whole suite over processes, but not a few files that are named.

    There are half as many again as cores, because a fifth of the time tests wait, for timeouts and other processes.
    """
    whole = config.args_source is config.ArgsSource.TESTPATHS
    cores = len(os.sched_getaffinity(0))
    return min(8, cores + cores // 2) if whole else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have most slow tests and end with the smallest, so that no core waits for the last."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    size = Counter(item.path for item in items)
    # The path keeps the tests of a file together.
    items.sort(key=lambda item: (-slow[item.path], -size[item.path], str(item.path)))


@pytest.fixture(scope="session")
def exhaustive(request) -> bool:
    """Return whether to try all faults instead of a sample."""
    return request.config.getoption("--exhaustive")


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Iterator[Launcher]:
    """Yield a launcher that starts scripts of the project as processes without imports."""
    launcher = Launcher(tmp_path_factory.mktemp("programs"))
    yield launcher
    launcher.end()


@pytest.fixture(scope="session")
def small_programs(programs, trained, image_dir, vae, tmp_path_factory) -> SmallPrograms:
    """Return a launcher of small commands of every program besides training."""
    folder = tmp_path_factory.mktemp("inputs")
    inputs = {"ckpt": trained, "images": image_dir, "vae": vae, **small_inputs(folder)}
    return SmallPrograms(programs, inputs)


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    """Yield a disk that can become full or read-only."""
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.end()


@pytest.fixture(scope="module")
def digits() -> Digits:
    """Return the default data, set up."""
    data = Digits()
    data.setup()
    return data


@pytest.fixture(scope="session")
def training(programs, tmp_path_factory):
    """Return a small training run that can be started, and struck, any number of times; see small_training.py."""
    from small_training import SmallTraining  # it imports this module

    return SmallTraining(programs, tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Let torch, NumPy and SciPy compute in one thread, because processes share the cores."""
    torch.set_num_threads(1)
    threadpool_limits(1, user_api="blas")


@pytest.fixture(autouse=True, scope="session")
def uncollected_imports() -> None:
    """Exempt imported modules from garbage collection, which takes a fifth of the time of test_variants.py."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory) -> None:
    """Keep cached files apart from the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


def tiny_net(num_classes: int = 10, **options) -> UViT:
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "channels": 1, "dim": 16, "depth": 2, "heads": 2}
    return UViT(**{**sizes, "num_classes": num_classes, "alpha_min": 0.7, "init": "xavier", **options})


def tiny_task(net: UViT | None = None, lr: float = 1e-3, schedule: str = "constant", **options) -> DiffusionTask:
    optim = Optimization(lr, (0.9, 0.99), 0.03, warmup_steps=10, schedule=schedule)
    return DiffusionTask(net or tiny_net(), sampling=Sampling("dpm++", 4, 2.0), optim=optim, **options)


def tiny_trainer(folder: Path, *callbacks: Callback, max_steps: int = 10, **options) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    quiet |= {"accelerator": "cpu", "devices": 1, "logger": False, "log_every_n_steps": 5, "limit_val_batches": 0}
    if not any(isinstance(callback, LastCheckpoint) for callback in callbacks):
        callbacks = (*callbacks, LastCheckpoint(every_n_steps=10_000))
    return Trainer(default_root_dir=folder, max_steps=max_steps, callbacks=list(callbacks), **{**quiet, **options})


def digits_config(**callbacks: dict[str, object]) -> dict:
    """configs/digits.yaml, with other arguments of its callbacks."""
    content = yaml.safe_load((ROOT / "configs" / "digits.yaml").read_text())
    for callback in content["trainer"]["callbacks"]:
        name = callback["class_path"].rpartition(".")[2]
        callback["init_args"] = {**callback.get("init_args", {}), **callbacks.get(name, {})}
    return content


class Losses(Callback):
    """Remembers every training loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        self.values.append(float(outputs["loss"]))


def save_tiny_vae(folder: Path, seed: int = 0) -> Path:
    """Stable Diffusion's autoencoder, shrunk, with random weights, as its users have it: a folder of diffusers'."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    widths = {"block_out_channels": [8, 8, 16, 16], "layers_per_block": 1, "norm_num_groups": 4}
    AutoencoderKL(**kinds, **widths, latent_channels=4, sample_size=64).save_pretrained(folder)
    return folder


def state(task: DiffusionTask) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in task.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def leaves(tree: object, place: tuple = ()) -> Iterator[tuple[tuple, object]]:
    """Yield the values of nested containers, and where each lies: ("net", "dim")."""
    if not isinstance(tree, dict | list | tuple):
        yield place, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(value, (*place, key))


@pytest.fixture
def mine(monkeypatch) -> Iterator[None]:
    """Forgets the user's module `mine` of the working folder after a test, and what it registered.

    Types are not checked meanwhile: they have the names that the tables had when the tests began. The check replaces
    the annotation of a function by its type at the first call, which is undone.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for kind in (UViT, SiT, ViT, MAE, ResNet):
        function = kind.__init__
        while function is not None:
            monkeypatch.setitem(function.__annotations__, "schedule", "decay.Schedule")
            function = getattr(function, "__wrapped__", None)
    tables = METRICS, EXTRACTORS, SETS, SAMPLERS, PROTOCOLS, SHORTCUTS
    before = [dict(table) for table in tables]
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("mine", None)
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture(autouse=True)
def _launchers() -> Iterator[None]:
    """Remove the variables that Lightning sets where it starts processes: later runs would find a launcher."""
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """Return a .ckpt of a few real steps, with EMA weights."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_trainer(folder, EMA(0.9), max_steps=12).fit(tiny_task(), Digits(32))
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    """Return a checkpoint of a small MAE after a few steps, in the folder of a version of a run."""
    folder = tmp_path_factory.mktemp("encoder") / "digits_mae" / "version_3"
    tiny_trainer(folder, EMA(0.9), max_steps=5).fit(mae_task(), Digits(32))
    return folder / "checkpoints" / "last.ckpt"


def run_script(monkeypatch, folder, name, *args):
    """`python NAME ...` in this process, in `folder`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(ROOT / name), *map(str, args)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def train(monkeypatch, folder, *args):
    """`python train.py ...` in this process, in `folder`."""
    run_script(monkeypatch, folder, "train.py", *args)


def print_config(monkeypatch, capsys, folder, *args) -> str:
    """Return what `python train.py ... --print_config` prints; nothing is trained."""
    with pytest.raises(SystemExit) as stop:
        train(monkeypatch, folder, *args, "--print_config")
    printed = capsys.readouterr()
    assert not stop.value.code, printed.err
    return printed.out


def sample(monkeypatch, folder, *args):
    """`python sample.py ...` in this process, in `folder`."""
    run_script(monkeypatch, folder, "sample.py", *args)


def pixels(path: Path) -> np.ndarray:
    """Return the images of an .npz."""
    return np.load(path)["arr_0"]


def trained_once(patch: pytest.MonkeyPatch) -> None:
    """Train the small classifier once on the same images for all evaluations in this process, for one cycle."""
    train = small_classifier._train

    def remembered(images, labels):
        key = images.numpy().tobytes(), labels.numpy().tobytes()
        if key not in CLASSIFIERS:
            CLASSIFIERS[key] = train(images, labels)
        return copy.deepcopy(CLASSIFIERS[key])

    patch.setattr(small_classifier, "CYCLES", 1)
    patch.setattr(small_classifier, "_train", remembered)


@pytest.fixture(scope="session")
def vae(tmp_path_factory) -> Path:
    return save_tiny_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="session")
def image_dir(tmp_path_factory) -> Path:
    """Return two classes of eleven smooth images."""
    folder, random = tmp_path_factory.mktemp("images"), torch.Generator().manual_seed(0)
    for i in range(COUNT):
        coarse = torch.randint(256, (3, 4, 3), generator=random, dtype=torch.uint8)
        path = folder / ("cat", "dog")[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(coarse.numpy()).resize((40, 48), Image.Resampling.BICUBIC).save(path)
    return folder


@pytest.fixture(scope="session")
def encoded(image_dir, vae, tmp_path_factory) -> Path:
    """Return latents of the images."""
    return encode(image_dir, tmp_path_factory.mktemp("latents") / "train", vae)
