"""What a GPU does, in one command: host synchronisations, a run that is killed and resumed, doctor, speed of training.

python -m benchmarks.gpu [--minutes 15] [--device cpu --quick] [--out runs/gpu]

Writes OUT.json and OUT.md after each row, so that a command that is stopped leaves what it has measured. The speeds
come last and fill the minutes; sizes for which no time is left are listed, and a size that has begun is finished.
`--device cpu --quick` tests the program, without the synchronisations, which only GPUs have; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer

import uvit_decay
from benchmarks import networks, table
from benchmarks.cases import Setting
from benchmarks.made import photographs
from benchmarks.measuring import added_memory
from benchmarks.scaling import Row, markdown, seconds
from benchmarks.training import OurStep, flops, held_bytes, images, task_of
from uvit_decay.callbacks import EMA
from uvit_decay.checkpoint import read_training_checkpoint
from uvit_decay.data import Images
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.diffusion.sampling import DiffusionModel, Sampling
from uvit_decay.generation.samples import Samples
from uvit_decay.nn import MAE, SiT, UViT
from uvit_decay.runs.history import METRICS, read_rows
from uvit_decay.terminal.errors import UserError, check_numbers

Build = Callable[[], UViT | SiT | MAE]


class Size(NamedTuple):
    """A network, and the batch sizes with which its training steps are measured."""

    build: Build
    batches: tuple[int, int]


NETWORKS = {
    "uvit-s/2, 32x32x3": Size(networks.uvit_s, (128, 256)),
    "sit-xl/2, 32x32x4": Size(partial(networks.sit_xl, 28), (32, 64)),
    "mae-b/16, 224x224": Size(networks.mae_b, (128, 256)),
}
QUICK = {
    "width 64, 17 tokens": Size(partial(networks.small, 64), (2, 4)),
    "MAE of width 64": Size(networks.tiny_mae, (2, 4)),
}
MINUTES = 15
RUN = 0.1  # of the minutes: the time of the run that is killed and resumed, without its two starts
LEAST = 0.5  # minutes of this run
PAUSE = 10  # seconds of each of its minutes from its first checkpoint until it is killed
# Expected waits for a GPU: what the tests see on torch's meta device.
WAITS = {"a step that is not logged": 0, "a logged step": 2, "a sampler's batch": 1}
SYNC = "called a synchronizing CUDA operation"  # torch's warning
CONFIG = "cifar10_uvit_s"
PACKAGE = Path(uvit_decay.__file__).parent


def speed(setting: Setting, minutes: float) -> Iterator[Row]:
    """Measure training steps in bf16: eager first, so that what is slow to compile costs no other row.

    Args:
        setting: where steps are measured.
        minutes: after which no further size is begun.
    """
    end = time.monotonic() + 60 * minutes
    sizes = QUICK if setting.quick else NETWORKS
    for compiled in (False, True)[: 1 + setting.compiled]:
        for name, size in sizes.items():
            for batch in size.batches:
                row: Row = {"network": name, "batch": batch, "compiled": compiled}
                if time.monotonic() > end:
                    yield row | {"note": "no time left"}
                else:
                    yield row | step(size.build, batch, compiled, setting)


@cache
def work_of_an_image(build: Build) -> int:
    """Return the FLOPs of an image in a training step of the plain network."""
    with torch.device("meta"):
        return flops(build(), 1)


def step(build: Build, batch: int, compiled: bool, setting: Setting) -> Row:
    """Measure one size: loss, backward pass, optimizer, schedule and EMA, without Lightning's own loop."""
    gc.collect()  # the previous network
    torch.compiler.reset()  # or a second batch size would be compiled for all sizes
    try:
        net = build().to(setting.device)
        task = task_of(networks.compiled(net) if compiled else net).train()
        run = partial(OurStep(task, images(net, batch, setting.device), setting.device), True)
        first = setting.clock.seconds(run)
        memory = added_memory(run, setting.device) or 0
        taken = seconds(setting.clock, run, setting.budget)
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}
    work = batch * work_of_an_image(build)
    found = {"first step s": first, "ms": 1e3 * taken, "images/s": batch / taken, "TFLOP/s": work / taken / 1e12}
    return found | {"mfu": work / taken / setting.rates["bf16"], "GiB": (memory + held_bytes(net)) / 2**30}


@contextmanager
def counted_syncs() -> Iterator[Counter[str]]:
    """Count where the host waits for the GPU, by the innermost line of this project, or of what called it."""
    found: Counter[str] = Counter()
    shown = warnings.showwarning

    def note(message: Warning | str, *others: Any, **named: Any) -> None:
        if SYNC in str(message):
            stack = traceback.extract_stack()[:-1]
            place = ([frame for frame in stack if Path(frame.filename).is_relative_to(PACKAGE)] or stack)[-1]
            found[f"{Path(place.filename).name} {place.name}"] += 1
        else:
            shown(message, *others, **named)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


class EachStep(Callback):
    """What was counted from the start of a training step to that of the next one."""

    def __init__(self, counted: Counter[str]) -> None:
        self.counted, self.steps = counted, list[Counter[str]]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.append(Counter(self.counted))
        self.counted.clear()


def syncs(setting: Setting, pictures: Path) -> list[Row]:
    """Count what steps of a trainer and a batch of a sampler wait for, beside what is expected."""
    net = networks.small(64) if setting.quick else networks.uvit_s()
    task = task_of(net)
    options = dict(logger=False, enable_checkpointing=False, enable_model_summary=False, limit_val_batches=0)
    options |= {"precision": "bf16-mixed", "accelerator": setting.device.type, "devices": 1, "log_every_n_steps": 4}
    data = Images(str(pictures), image_size=net.image_size, channels=net.channels, batch_size=setting.size(8, 128, 4))
    with counted_syncs() as counted:
        each = EachStep(counted)
        Trainer(max_steps=13, callbacks=[EMA(), each], **options).fit(task, data)
        model = DiffusionModel.from_net(net.to(setting.device).eval(), VP(), "eps", setting.device)
        samples = Samples(model, Sampling(steps=4), "raw")
        samples.images(range(4))  # tables of the noise levels are copied once
        counted.clear()
        samples.images(range(4))
        sampled = Counter(counted)
    steps = each.steps[2:]  # of steps 2 to 12; the first one begins with the copies of the run
    kinds = {
        "a step that is not logged": [found for number, found in enumerate(steps, 2) if number % 4],
        "a logged step": [found for number, found in enumerate(steps, 2) if number % 4 == 0],
        "a sampler's batch": [sampled],
    }
    rows = []
    for name, every in kinds.items():
        most = max(every, key=Counter.total)
        rows.append({"what": name, "expected": WAITS[name], "found": most.total(), "where": "; ".join(most) or "-"})
    return rows


def run_flags(setting: Setting, pictures: Path, runs: Path, minutes: float) -> list[str]:
    """Return the flags of a U-ViT-S/2 run of some minutes that looks for its checkpoint, not compiled.

    A compilation could take longer than these minutes. Where quick, it is a small run of a hundred steps.
    """
    callbacks = [{"class_path": f"uvit_decay.callbacks.{name}"} for name in ("EMA", "Summary", "LastCheckpoint")]
    callbacks[-1] |= {"init_args": {"every_n_steps": setting.size(5, 100, 5)}}
    flags = [
        *("--config", CONFIG, f"--data.path={pictures}", f"--trainer.logger.save_dir={runs}", "--ckpt_path=auto"),
        *("--trainer.accelerator", setting.device.type, "--trainer.devices=1"),
        *("--trainer.callbacks", json.dumps(callbacks), "--trainer.enable_progress_bar=false", "--model.compile=false"),
    ]
    if not setting.quick:
        return [*flags, "--trainer.max_time", json.dumps({"minutes": minutes})]
    small = ("--model.net.dim=16", "--model.net.depth=2", "--model.net.heads=2", "--data.batch_size=4")
    return [*flags, *small, "--trainer.max_steps=100", "--trainer.log_every_n_steps=1"]


def killed_and_resumed(flags: list[str], runs: Path, pause: float) -> Row:
    """Kill a run `pause` seconds after its first checkpoint, resume it by the same command, and check its log."""
    command = [sys.executable, "-m", "uvit_decay", "train", "fit", *flags]
    run = runs / CONFIG / "version_0"
    process = subprocess.Popen(command)
    while not (run / "checkpoints" / "last.ckpt").exists():
        if process.poll() is not None:
            raise UserError(f"training ended with exit code {process.returncode} before its first checkpoint")
        time.sleep(0.1)
    time.sleep(pause)
    process.kill()
    if (code := process.wait()) >= 0:
        raise UserError(f"training ended with exit code {code} before it was killed")
    saved = newest_step(run)
    if code := subprocess.run(command).returncode:
        raise UserError(f"the resumed training ended with exit code {code}")
    ended = newest_step(run)
    rows = [(number, row) for number, row in read_rows(run / METRICS) if "train/loss" in row]
    logged = [number for number, _ in rows]  # a step is logged under the number of those before it
    if logged != [*range(logged[0], ended, logged[0] + 1)] or not saved < ended:
        raise UserError(f"{run / METRICS} has other steps than a run to step {ended} that nobody killed")
    found: Row = {"resumed at step": saved, "last step": ended}
    found |= {"first loss": float(rows[0][1]["train/loss"]), "last loss": float(rows[-1][1]["train/loss"])}
    for name in ("images_per_second", "mfu", "memory_gib"):
        values = [float(row[f"train/{name}"]) for _, row in rows if f"train/{name}" in row]
        found[name] = statistics.median(values)
    return found


def newest_step(run: Path) -> int:
    """Return the step of a run's newest checkpoint; all are read whole."""
    return max(read_training_checkpoint(path)["global_step"] for path in (run / "checkpoints").glob("*.ckpt"))


class Results:
    """Rows by the name of their table, written to both files whenever there is a new one.

    Args:
        out: path of the files, without suffix.
        setting: where the rows are measured.
    """

    def __init__(self, out: Path, setting: Setting) -> None:
        self.out = out
        self.facts = table.machine(setting)
        self.tables: dict[str, list[Row]] = {}
        out.parent.mkdir(parents=True, exist_ok=True)
        print(self.head, flush=True)

    @property
    def head(self) -> str:
        """The machine in one line."""
        facts = self.facts
        rate = facts["matrix_rate"]["bf16"] / 1e12
        machine = f"{facts['date']}, {facts['device']}, torch {facts['versions']['torch']}"
        return f"{machine}, bf16 products {rate:.4g} TFLOP/s\n"

    def keep(self, name: str, rows: Iterable[Row]) -> None:
        """Print and write the rows of a table as they come."""
        kept = self.tables[name] = []
        for row in rows:
            kept.append(row)
            print(row, flush=True)
            found = {"machine": self.facts, **self.tables}
            self.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            parts = [format_table(name, rows) for name, rows in self.tables.items()]
            self.out.with_suffix(".md").write_text(self.head + "".join(parts))
        print(format_table(name, kept), flush=True)


def format_table(name: str, rows: list[Row]) -> str:
    """Return the rows as a table in Markdown with the columns of all of them."""
    columns = dict.fromkeys(column for row in rows for column in row)
    return markdown(name, rows, [*columns])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the program in a minute")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="after which no further size is measured; at least 4 for all parts; default: %(default)s",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="files, without suffix; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    check_numbers("(0, inf)", **{"--minutes": options.minutes})
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch finds no GPU here; --device cpu --quick tests the program")
    start = time.monotonic()
    budget = 0.1 if options.quick else 3.0
    setting = Setting(torch.device(options.device), options.quick, options.device == "cuda", budget=budget)
    results = Results(options.out, setting)
    run_minutes = max(LEAST, RUN * options.minutes)
    with tempfile.TemporaryDirectory() as folder:
        pictures, runs, untouched = (Path(folder, name) for name in ("pictures", "runs", "untouched"))
        photographs(pictures, setting.size(64, 2000, 24), width=64)
        flags = run_flags(setting, pictures, runs, run_minutes)
        flags_of_doctor = run_flags(setting, pictures, untouched, run_minutes)  # where no run has ended
        # What no other machine can tell comes first.
        if setting.on_gpu:
            results.keep("Where the host waits for the GPU", syncs(setting, pictures))
        pause = 0 if options.quick else PAUSE * run_minutes
        failures = []  # they do not keep the speeds from being measured
        try:
            results.keep("A run that was killed and resumed", [killed_and_resumed(flags, runs, pause)])
        except UserError as error:
            failures.append(str(error))
        if subprocess.run([sys.executable, "-m", "uvit_decay", "doctor", *flags_of_doctor]).returncode:
            failures.append("the doctor found errors, see above")
        left = options.minutes - (time.monotonic() - start) / 60
        results.keep("Training steps in bf16", speed(setting, left))
    print(f"\n{time.monotonic() - start:.0f} s; {options.out.with_suffix('.json')}")
    if failures:
        raise UserError("; ".join(failures))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
