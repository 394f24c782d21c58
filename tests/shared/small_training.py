"""A training run of three seconds that uses every feature of runs, and its results, to compare runs bit for bit."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from conftest import digits_config
from programs import Launcher, Program, ranks

MEASURED = {"train/images_per_second", "train/mfu", "train/memory_gib", "epoch"}  # what differs between equal runs
CLASSIFIER = {"class_path": "uvit_decay.encoders.SmallClassifier"}
EVERY = {
    "LinearProbes": {"every_n_steps": 8, "times": [0.1], "max_train": 60, "max_test": 40},
    "GenerationMetrics": {"every_n_steps": 12, "num": 66, "extractor": CLASSIFIER},
    "Preview": {"every_n_steps": 8, "rows": 1},
    "LastCheckpoint": {"every_n_steps": 4},
}
STEPS = 14
FLAGS = [
    *("--model.net.dim=16", "--model.net.depth=2", "--model.sampling.steps=2", "--trainer.log_every_n_steps=1"),
    *(f"--trainer.max_steps={STEPS}", "--trainer.val_check_interval=4", "--trainer.limit_val_batches=2"),
    *("--trainer.enable_progress_bar=false", "--ckpt_path=auto"),
]
STEP = "Task.optimizer_step"
PLACES = {  # functions in which runs are struck
    "in a step": STEP,
    "in the loss": "DiffusionTask.loss",
    "in the EMA": "EMA.on_train_batch_end",
    "in a checkpoint": "LastCheckpoint._save",
    "between checkpoints' names": "rotate",
    "in validation": "_EvaluationLoop.run",
    "in the previews": "Preview.evaluate",
    "in the metrics": "GenerationMetrics.evaluate",
    "in the probes": "LinearProbes.evaluate",
    "in the log": "RunLogger.log_metrics",
    "in a new header of the log": "RowWriter._rewrite_with_new_header",
    "in the summary": "Summary.on_fit_end",
}
FILES = ("generation.jsonl", "probes.jsonl", "probes.csv", "samples.png")
TRAINED = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")  # entries of a checkpoint
GOES_ON = re.compile(r"resuming from \S+ \(step (\d+)\)")


class SmallTraining:
    """Starts the same command in different folders."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher, self.config = launcher, folder / "small.yaml"
        self.config.write_text(yaml.safe_dump(digits_config(**EVERY)))

    def start(self, folder: Path, *more: str, before: Sequence[str] = (), **options: Any) -> Program:
        """Start the training in `folder`, with `more` flags, and return at once; `before` is a script that runs it."""
        folder.mkdir(exist_ok=True)
        environment = {"XDG_CACHE_HOME": str(self.config.parent), **options.pop("environment", {})}
        command = ["train.py", "fit", f"--config={self.config}", *FLAGS, *more]
        return self.launcher.start(*before, *command, cwd=folder, environment=environment, **options)

    def ranks(self, folder: Path, *more: str, **options: Any) -> list[Program]:
        """Start two ranks, with torchrun's variables; `options` are for the second rank."""
        flags = ("--trainer.devices=2", "--trainer.strategy=ddp", *more)
        first, second = ranks()
        alone = self.start(folder, *flags, environment=first)
        return [alone, self.start(folder, *flags, environment=second, **options)]

    @cached_property
    def undisturbed(self) -> tuple[Path, dict[str, list[int]]]:
        """Return the folder of an undisturbed run, and the calls within each run of the functions of PLACES."""
        folder = self.config.parent / "undisturbed"
        program = self.start(folder, watched=[*PLACES.values()])
        assert program.wait() == 0, program.stderr
        return runs(folder)[-1], program.calls


def goes_on_from(program: Program) -> int:
    """Return the step of the checkpoint from which a run resumed; 0 for a new run."""
    found = GOES_ON.search(program.stdout + program.stderr)
    return int(found[1]) if found else 0


def runs(folder: Path) -> list[Path]:
    """Return the run folders, the oldest first."""
    return sorted((folder / "runs" / "digits").iterdir(), key=lambda run: int(run.name.rpartition("_")[2]))


def rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv in the order of their steps, without values that differ between equal runs."""
    with (run / "metrics.csv").open() as file:
        content = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    content = [{key: row[key] for key in row.keys() - MEASURED} for row in content]
    return sorted(content, key=lambda row: (int(row["step"]), sorted(row)))


def read_training_state(run: Path) -> dict[str, Any]:
    """Return the weights and the training state in a run's checkpoint."""
    contents = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return {**{name: contents[name] for name in TRAINED}, "ema": contents["callbacks"]["EMA"]}


def differences(run: Path, other: Path, resumed: int = 0, killed: bool = True) -> list[str]:
    """Return what differs, to the bit, between two runs that have ended: files, rows of the log, parts of the state.

    A run that resumed from a step may lack the rows of that step, or only its validation if it was not `killed`. After
    the last step, what a kill left out is named and not made: the files are not compared.
    """
    files = FILES if resumed < STEPS else ()
    missing = (resumed - 1, resumed) if killed else (resumed,)
    found = [name for name in files if (run / name).read_bytes() != (other / name).read_bytes()]
    one, two = rows(run), rows(other)
    found += [f"row {row}" for row in one if row not in two]
    lost = (row for row in two if row not in one)
    found += [f"no row {row}" for row in lost if int(row["step"]) not in missing]
    ours, theirs = read_training_state(run), read_training_state(other)
    return found + [name for name in ours if not equal(ours[name], theirs[name])]


def equal(a: Any, b: Any) -> bool:
    """Return whether nested containers hold the same values, tensors to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b
