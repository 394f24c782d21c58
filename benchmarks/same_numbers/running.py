"""How the command of a row is run in a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from benchmarks.same_numbers.rows import CALLBACKS, CLASSES, KEPT, PICTURES, RESUMED, STEPS, Row


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


def run_row(row: Row, old: Path, new: Path, out: Path) -> list[str]:
    """Run a row on both sides at the same time; return an error for each side that failed."""
    if row.resumed:
        errors = [line for name in row.resumed for line in copy_run(name, out)]
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


def describe(checkout: Path) -> str:
    """Return the commit of a checkout, with a + if files differ from it; "" if it has none."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout
    return commit + "+" * bool(changes)


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
    paths = {"checkout": checkout, "out": folder, "old": out / "old", "here": Path(__file__).resolve().parent}
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
