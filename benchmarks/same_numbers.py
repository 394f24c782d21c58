"""Compare two checkouts bit for bit: the weights that they train, the pictures that they draw, the numbers they report.

    python benchmarks/same_numbers.py OLD_CHECKOUT NEW_CHECKOUT [--only ROW ...] [--out FOLDER]

Each row of `ROWS` is a command of train.py, sample.py or evaluate.py. Both checkouts run it, each in its own folder and
in one thread, in float32 and with given numbers of images, so that the result depends on nothing that a machine chooses
for itself. Commands that read a checkpoint read the file that OLD wrote; the row `resume` continues OLD's run from its
tenth step and compares with OLD's run that was not stopped. Then the files of both sides are compared: all tensors of
checkpoints (weights, averages, optimizer moments), all pixels of pictures, and all numbers of tables except times.

The table has a line for each row. The exit code is 1 if a row differs or fails. What OLD has already done in FOLDER is
not run again, unless its checkout has changes that are not committed. The program needs torch, numpy, PIL and PyYAML,
and nothing of uvit_decay. It takes about five minutes on two cores.

Where a flag has another name in one of the checkouts, put it into `old` or `new` of its row.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import yaml
from PIL import Image

CLASSES, PICTURES = 3, 40  # pictures of each class
RESUMED = "resumed"  # folder of the runs that NEW resumes
STEPS, STORED = 20, 10  # steps of each training; the step whose checkpoint is kept
KEPT = f"step_{STORED:08d}.ckpt"
# Parts of names of values that another machine, day or path changes.
UNCOMPARED = (
    "second",
    "time",
    "hour",
    "date",
    "host",
    "path",
    "file",
    "version",
    "memory",
    "throughput",
    "mfu",
    "hash",
)
# Names of values that ac8466d5 writes and later versions do not, on purpose: CHANGELOG.md says so.
GONE = ("knn_without_pcs_accuracy", "pcs_removed")
DESCRIPTIONS = ("settings", "uvit_decay", "loops", "metadata", "protocol")  # options and counters beside the results

CALLBACKS = {
    "EMA": {"decay": 0.9},
    "Preview": {"every_n_steps": STORED, "rows": 3, "columns": 3},
    "GenerationMetrics": {
        "extractor": {"class_path": "uvit_decay.metrics.SmallClassifier"},
        "num": 80,
        "max_reference": 100,
        "every_n_steps": STORED,
    },
    "Reconstructions": {"every_n_steps": STORED, "num": 4},
    "LinearProbes": {"every_n_steps": STORED, "max_train": 60, "max_test": 40},
    "LastCheckpoint": {"every_n_steps": STORED, "keep_every_n_steps": STORED},
}
DIFFUSION = ("EMA", "Preview", "GenerationMetrics", "LinearProbes", "LastCheckpoint")


@dataclass(frozen=True)
class Row:
    """A command that both checkouts run, and the files that are compared afterwards.

    command: words after `python`; {out} is the folder of this side, where it runs, {old} the folder of OLD, {checkout}
        the checkout.
    files: patterns of the files that are compared, below {out}.
    callbacks: callbacks of a training, given by a configuration of its own, {out}/NAME.yaml.
    old, new: more words for one side, where flags differ between the checkouts.
    renamed: files that have another name in NEW: name in OLD -> name in NEW.
    resumed: the training of OLD whose copy NEW resumes from its stored step; OLD does not run the command.
    """

    name: str
    command: str
    files: tuple[str, ...]
    callbacks: tuple[str, ...] = ()
    old: str = ""
    new: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    resumed: str = ""


def train(name: str, config: str, callbacks: Sequence[str], flags: str, results: Sequence[str], **options: str) -> Row:
    """Return the row of a training run, whose folder is {out}/runs/NAME/version_0."""
    given = f"--config {{checkout}}/configs/{config}.yaml --config {{out}}/{name}.yaml"
    files = ("checkpoints/last.ckpt", f"checkpoints/{KEPT}", "metrics.csv", *results)
    patterns = tuple(f"runs/{name}/version_0/{file}" for file in files)
    return Row(name, f"{{checkout}}/train.py fit {given} {flags}", patterns, tuple(callbacks), **options)


SAMPLED = ("samples/*.png", "generation.jsonl", "probes.jsonl")
TINY = "--model.net.dim 32 --model.net.depth 4 --model.net.heads 2"
FOLDER = "--data.path {out}/pictures --data.image_size 32 --data.batch_size 16"
LAST = "{old}/runs/%s/version_0/checkpoints/last.ckpt"
DIGITS, SIT, MAE = LAST % "digits", LAST % "sit", LAST % "mae"
FEW = "--max-train 60 --max-test 40"

ROWS = (
    train("digits", "digits", DIFFUSION, "--model.sampling.steps 4", SAMPLED),
    train("sit", "digits_sit", DIFFUSION, "--model.sampling.steps 4", SAMPLED),
    train(
        "uvit",
        "cifar100_uvit_s_cond",
        ("EMA", "Preview", "LastCheckpoint"),
        f"{TINY} --model.net.num_classes {CLASSES} --data Images {FOLDER} --data.flip true --trainer.devices 1"
        " --trainer.accelerator cpu --trainer.check_val_every_n_epoch null --model.sampling.sampler dpm++"
        " --model.sampling.steps 4",
        ("samples/*.png",),
    ),
    train(
        "mae",
        "mae_cifar10",
        ("EMA", "Reconstructions", "LinearProbes", "LastCheckpoint"),
        f"{TINY} --model.net.decoder_depth 2 --data.holdout 0.2 --trainer.val_check_interval {STORED} {FOLDER}",
        ("reconstructions/*.png", "probes.jsonl"),
    ),
    train(
        "resnet",
        "resnet_cifar10",
        ("LastCheckpoint",),
        f"--model.net.width 8 --model.net.depth 8 --model.net.num_classes {CLASSES} {FOLDER}",
        (),
    ),
    Row(
        "resume",
        "{checkout}/train.py fit --config {checkout}/configs/digits.yaml --config {out}/digits.yaml"
        f" --model.sampling.steps 4 --ckpt_path runs/digits/version_0/checkpoints/{KEPT}",
        tuple(f"runs/digits/version_0/{file}" for file in ("checkpoints/last.ckpt", "metrics.csv", *SAMPLED)),
        resumed="digits",
    ),
    Row(
        "sample digits", f"{{checkout}}/sample.py --ckpt {DIGITS} --num 20 --steps 4 --out {{out}}/s0.npz", ("s0.npz",)
    ),
    Row(
        "sample raw, guided in an interval",
        f"{{checkout}}/sample.py --ckpt {DIGITS} --num 12 --steps 4 --weights raw --guidance-interval 0.2,0.8"
        " --guidance 3 --classes 3,5 --seed 7 --out {out}/s1.npz",
        ("s1.npz",),
    ),
    Row(
        "sample sit, SDE",
        f"{{checkout}}/sample.py --ckpt {SIT} --num 12 --sampler sit-sde --steps 4 --out {{out}}/s2.npz",
        ("s2.npz",),
    ),
    Row(
        "sample sit, dopri5, guide",
        f"{{checkout}}/sample.py --ckpt {SIT} --num 4 --sampler dopri5 --guidance 1.5 --guide-step {STORED}"
        " --out {out}/s3.npz",
        ("s3.npz",),
    ),
    Row(
        "sample the bundled CIFAR-10 network",
        "{checkout}/sample.py --ckpt {checkout}/checkpoints/cifar10.safetensors --num 4 --steps 4 --out {out}/s4.npz",
        ("s4.npz",),
    ),
    Row(
        "evaluate samples",
        f"{{checkout}}/evaluate.py generation --ckpt {DIGITS} --num 300 --steps 4 --reference digits:train"
        " --max-reference 400 --features digits --kid-subset 100 --metrics fd,is,kid,prc --out {out}/report.json",
        ("report.json",),
    ),
    Row(
        "probe digits",
        f"{{checkout}}/evaluate.py probe --ckpt {DIGITS} --data digits {FEW} --times 0.1,0.3 --out {{out}}/probes",
        ("probes/*.csv", "probes/*.json"),
    ),
    Row(
        "noise share",
        f"{{checkout}}/evaluate.py probe --ckpt {DIGITS} --data digits --protocol noise-share --times 0.1,0.3"
        " --noise-draws 2 --noise-images 40 --out {out}/noise",
        (),
        renamed={"noise/probes.csv": "noise/noise_share.csv"},
    ),
    Row(
        "probe sit, ddae",
        f"{{checkout}}/evaluate.py probe --ckpt {SIT} --data digits {FEW} --times 0.2 --protocol ddae --epochs 2"
        " --out {out}/ddae",
        ("ddae/*.csv", "ddae/*.json"),
    ),
    Row(
        "classify mae",
        f"{{checkout}}/evaluate.py classify --ckpt {MAE} --data {{out}}/pictures --test {{out}}/test"
        " --out {out}/classify.json",
        ("classify.json",),
    ),
    Row(
        "reconstruct mae",
        f"{{checkout}}/evaluate.py reconstruct --ckpt {MAE} --images {{out}}/pictures --num 4"
        " --out {out}/reconstructed.png",
        ("reconstructed.png",),
    ),
    Row(
        "export sit",
        f"-m uvit_decay export {SIT} {{out}}/sit.safetensors",
        ("sit.safetensors",),
    ),
)


@dataclass
class Comparison:
    """What was compared of a row, and the differences."""

    values: int = 0
    differences: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows in both checkouts, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="checkout whose numbers are right, such as a git worktree")
    parser.add_argument("new", type=Path, help="checkout that is compared with it")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[row.name for row in ROWS], help="some of the rows")
    parser.add_argument("--out", type=Path, help="folder for the files of both sides; default: a temporary one")
    options = parser.parse_args(argv)
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    with TemporaryDirectory() as temporary:
        out = (options.out or Path(temporary)).resolve()
        return compare_checkouts(rows, options.old.resolve(), options.new.resolve(), out)


def compare_checkouts(rows: Sequence[Row], old: Path, new: Path, out: Path) -> int:
    """Run `rows` in both checkouts below the folder `out`, print a line for each, and return the exit code."""
    print(f"old {old} {describe(old)}\nnew {new} {describe(new)}\nfiles {out}\n", flush=True)
    shutil.rmtree(out / "new", ignore_errors=True)
    for side in ("old", "new"):
        make_pictures(out / side)
    code = 0
    width = max(len(row.name) for row in rows)
    for row in rows:
        errors = run_row(row, old, new, out)
        found = Comparison() if errors else compare_row(row, out)
        if not (errors or found.values):
            errors = ["nothing to compare"]
        differences = errors + found.differences
        print(f"{row.name:{width}}  {found.values:>7} values  {'DIFFERENT' if differences else 'same'}", flush=True)
        for line in differences[:8]:
            print(f"    {line}", flush=True)
        if len(differences) > 8:
            print(f"    and {len(differences) - 8} more", flush=True)
        code = code or int(bool(differences))
    return code


def describe(checkout: Path) -> str:
    """Return the commit of a checkout, with a + if files differ from it; "" if it has none."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout
    return commit + "+" * bool(changes)


def make_pictures(folder: Path) -> None:
    """Write class folders of 32x32 pictures, pictures/ and test/, which are the same on each machine."""
    random = np.random.default_rng(0)
    for part, number in (("pictures", PICTURES), ("test", PICTURES // 4)):
        for label in range(CLASSES):
            target = folder / part / f"class{label}"
            target.mkdir(parents=True, exist_ok=True)
            for i in range(number):
                coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                coarse[..., label] //= 4
                Image.fromarray(coarse).resize((32, 32)).save(target / f"{i:03d}.png")


# How a row is run.


def run_row(row: Row, old: Path, new: Path, out: Path) -> list[str]:
    """Run a row on both sides at the same time; return an error for each side that failed."""
    if row.resumed:
        errors = copy_run(row.resumed, out)
        return errors or finish(row, "new", start(row, "new", new, out), out)
    stamp = out / "old" / f"{row.name}.done"
    commit = describe(old)
    done = f"{commit} {row}"
    started = {"new": start(row, "new", new, out)}
    if commit in ("", "+") or commit.endswith("+") or not stamp.exists() or stamp.read_text() != done:
        stamp.unlink(missing_ok=True)
        shutil.rmtree(out / "old" / "runs" / row.name, ignore_errors=True)
        started["old"] = start(row, "old", old, out)
    failed = {side: finish(row, side, process, out) for side, process in started.items()}
    if commit and not failed.get("old"):
        stamp.write_text(done)
    return [line for lines in failed.values() for line in lines]


def copy_run(name: str, out: Path) -> list[str]:
    """Copy OLD's run for NEW to resume, with one checkpoint; return an error if there is none."""
    source, target = out / "old" / "runs" / name, out / "new" / RESUMED / "runs" / name
    if not (source / "version_0" / "checkpoints" / KEPT).exists():
        return [f"old has no {KEPT} of {name}: run the row {name}, too"]
    shutil.copytree(source, target)
    for path in (target / "version_0" / "checkpoints").iterdir():
        if path.name != KEPT:
            path.unlink()
    return []


def start(row: Row, side: str, checkout: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start the command of a row on one side; its output is written to NAME.log in the folder of the side."""
    folder = out / side
    if row.callbacks:
        write_settings(folder / f"{row.name}.yaml", row)
    words = f"{row.command} {row.old if side == 'old' else row.new}".split()
    paths = {"checkout": checkout, "out": folder, "old": out / "old"}
    command = [sys.executable, *(word.format_map(paths) for word in words)]
    environment = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    where = folder / RESUMED if row.resumed else folder
    with (folder / f"{row.name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=where, env={**os.environ, **environment}, stdout=log, stderr=log)


def write_settings(path: Path, row: Row) -> None:
    """Write a configuration with the length, precision, run folder and callbacks of a training."""
    callbacks = [{"class_path": f"uvit_decay.callbacks.{name}", "init_args": CALLBACKS[name]} for name in row.callbacks]
    logger = {"class_path": "uvit_decay.runs.RunLogger", "init_args": {"experiment": row.name}}
    trainer = {"max_steps": STEPS, "precision": "32-true", "log_every_n_steps": 5, "logger": logger}
    path.write_text(yaml.safe_dump({"trainer": {**trainer, "callbacks": callbacks}}))


def finish(row: Row, side: str, process: subprocess.Popen[bytes], out: Path) -> list[str]:
    """Wait for a command; return its last line if it failed."""
    if process.wait() == 0:
        return []
    log = out / side / f"{row.name}.log"
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    return [f"{side} failed with exit code {process.returncode}: {lines[-1]} ({log})"]


# How two files are compared.


def compare_row(row: Row, out: Path) -> Comparison:
    """Compare the files of a row."""
    comparison = Comparison()
    old, new = out / "old", out / "new" / (RESUMED if row.resumed else "")
    for pattern in row.files:
        names = {str(path.relative_to(side)) for side in (old, new) for path in side.glob(pattern)}
        if not names:
            comparison.differences.append(f"{pattern}: neither side has written such a file")
        for name in sorted(names):
            compare_files(old / name, new / name, name, comparison)
    for before, after in row.renamed.items():
        compare_files(old / before, new / after, after, comparison)
    return comparison


def compare_files(old: Path, new: Path, name: str, comparison: Comparison) -> None:
    """Add the differences of a file that both sides have written."""
    missing = [str(path) for path in (old, new) if not path.exists()]
    if missing:
        comparison.differences.append(f"{name}: {missing[0]} is missing")
        return
    before, after = dict(read_values(old)), dict(read_values(new))
    for key in list(before):
        if key not in after and key.endswith(GONE):
            del before[key]
    for key in before.keys() | after.keys():
        if key not in before or key not in after:
            comparison.differences.append(f"{name}: {key} only in {'old' if key in before else 'new'}")
        elif difference := find_difference(before[key], after[key]):
            comparison.differences.append(f"{name}: {key}: {difference}")
    comparison.values += sum(np.size(value) for value in before.values())
    comparison.differences.sort()


def read_values(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and values of all tensors, pixels or numbers of a file."""
    if path.suffix == ".png":
        yield "pixels", np.asarray(Image.open(path))
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            yield from ((name, arrays[name]) for name in arrays.files if arrays[name].dtype.kind in "biuf")
    elif path.suffix == ".ckpt":
        yield from flatten(torch.load(path, map_location="cpu", weights_only=True))
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        yield from flatten(load_file(path))
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            yield from flatten([dict(line) for line in csv.DictReader(file)])
    elif path.suffix == ".jsonl":
        yield from flatten([json.loads(line) for line in path.read_text().splitlines()])
    else:
        yield from flatten(json.loads(path.read_text()))


def flatten(tree: object, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors and numbers of nested mappings and sequences, without those that a machine or a day changes."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            word = str(key).lower()
            if word not in DESCRIPTIONS and not any(part in word for part in UNCOMPARED):
                yield from flatten(value, f"{name}.{key}".lstrip("."))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from flatten(value, f"{name}[{i}]")
    elif isinstance(tree, torch.Tensor):
        yield name, to_bits(tree)
    elif (number := to_number(tree)) is not None:
        yield name, np.asarray(number)


def to_bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; bfloat16, which numpy lacks, as float32, which has each of its values."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_number(value: object) -> float | None:
    """Return a value of a table or of JSON as a number, None if it is none."""
    if isinstance(value, bool | int | float):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def find_difference(old: np.ndarray, new: np.ndarray) -> str | None:
    """Return how two arrays differ, None if they have the same shape, type and values; NaN equals NaN."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{old.dtype}{list(old.shape)} and {new.dtype}{list(new.shape)}"
    if np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
        return None
    if old.size == 1:
        return f"{old.item()} and {new.item()}"
    distance = np.abs(old.astype(np.float64) - new.astype(np.float64))
    largest = np.nanmax(distance) if np.isfinite(distance).any() else math.nan
    return f"{np.count_nonzero(old != new)} of {old.size} values, by {largest:.3g} at most"


if __name__ == "__main__":
    sys.exit(main())
