"""Small commands of every program besides training that writes files, each started in its own folder."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from latent_files import FLAGS
from programs import Launcher, Moment, Program

from uvit_decay.data import Digits
from uvit_decay.pictures import save_npz, save_pngs

FEW = ["--times", "0.1", "--max-train", "60", "--max-test", "40"]
QUICK = ["tests/shared/surroundings.py", "quick", "evaluate.py"]
DIGITS = ["--features", "digits", "--metrics", "fd,is"]
SAMPLE = ["sample.py", "--ckpt", "{ckpt}", "--num", "12", "--batch-size", "4", "--steps", "2"]
COMMANDS: dict[str, list[str]] = {
    "encode": ["-m", "uvit_decay", "encode", "{images}", "latents", "--vae", "{vae}", *FLAGS],
    "sample into a folder": [*SAMPLE, "--out", "samples"],
    "evaluate a checkpoint": [*QUICK, "generation", "--ckpt", "{ckpt}", "--num", "80", "--steps", "2", "--reference",
                              "{array}", *DIGITS, "--out", "report.json", "--save-samples", "kept.npz"],
    "evaluate images": [*QUICK, "generation", "--samples", "{digits}", "--reference", "{array}", *DIGITS, "--out",
                        "report.json"],
    "statistics": [*QUICK, "statistics", "{digits}", "--features", "digits", "--out", "stats.npz"],
    "probe": ["evaluate.py", "probe", "--ckpt", "{ckpt}", "--data", "digits", *FEW, "--out", "probes"],
    "classify": ["evaluate.py", "classify", "--ckpt", "{ckpt}", "--data", "digits", "--time", "0.1", "--max-train",
                 "60", "--max-test", "40", "--protocol", "knn", "--out", "classify.json"],
    "features": ["evaluate.py", "features", "--ckpt", "{ckpt}", "--images", "{digits}", "--out", "features"],
    "compare": ["evaluate.py", "compare", "{runs}/version_0", "{runs}/version_1", "--out", "compare.png"],
    "export": ["-m", "uvit_decay", "export", "{ckpt}", "model.safetensors"],
}  # fmt: skip
# Functions that write, and those that have a program's work in them.
WRITERS = ("replacing", "_claim", "check_writable", "FeatureStore.open", "FeatureStore.add", "FeatureStore.remove")
WORK = ("encode", "write_samples", "write_reports", "statistics", "probe", "classify", "export")
WATCHED = (*WRITERS, *WORK)
SOME = ("sample into a folder", "statistics", "export")  # of each kind of output, and quick


def skip_unless_tried(name: str, exhaustive: bool, some: Sequence[str] = SOME) -> None:
    """Skip a test of a program that is not one of `some`, unless all are tried."""
    if not exhaustive and name not in some:
        pytest.skip("with --exhaustive")


class SmallPrograms:
    """Starts these programs; `inputs` gives the values of the {names} in their commands."""

    def __init__(self, launcher: Launcher, inputs: Mapping[str, Path]) -> None:
        self.launcher, self.inputs = launcher, inputs
        self._undisturbed: dict[str, tuple[dict[str, bytes], dict[str, list[int]]]] = {}

    def undisturbed(self, name: str, folder: Path) -> tuple[dict[str, bytes], dict[str, list[int]]]:
        """Return the files that a program writes, and its calls within `WATCHED`; it runs once, in `folder`."""
        if name not in self._undisturbed:
            program = self.start(name, folder, watched=WATCHED)
            assert program.wait() == 0, program.stderr
            self._undisturbed[name] = contents(folder), program.calls
        return self._undisturbed[name]

    def start(
        self, name: str, folder: Path, *, more: Sequence[str] = (), before: Sequence[str] = (), **options: Any
    ) -> Program:
        """Start a program in `folder`, which also gets its caches, with `more` options; see `Launcher.start`.

        The words of `before` are another script, which runs it, and its options.
        """
        folder.mkdir(exist_ok=True)
        environment = {"XDG_CACHE_HOME": str(folder / "cache"), **options.pop("environment", {})}
        argv = [word.format_map(self.inputs) for word in COMMANDS[name]]
        return self.launcher.start(*before, *argv, *more, cwd=folder, environment=environment, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, including hidden ones, but not the empty files that locks leave."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".lock":
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def small_inputs(folder: Path) -> dict[str, Path]:
    """Make the inputs {digits}, a folder of images, {array}, an .npz, and {runs} with two runs."""
    digits = Digits()
    digits.setup()
    (folder / "pictures").mkdir()
    save_pngs(folder / "pictures", [digits.train[list(range(80))][0]])
    save_npz(folder / "array.npz", [digits.train[list(range(80, 170))][0]], 90)
    from run_folders import a_run  # which imports conftest.py, and that imports this

    for version in (0, 1):
        a_run(folder, version, alpha_min=0.5 + version / 10)
    return {"digits": folder / "pictures", "array": folder / "array.npz", "runs": folder / "digits"}


def draw_moments(calls: Mapping[str, Sequence[int]], number: int, seed: int) -> list[Moment]:
    """Draw moments, equally often in each function that was entered, uniform over its runs and their calls.

    The last tenth of the calls is left out, of which the next run may have fewer: an import takes more calls when it
    compiles a module, or looks into a folder for the first time.
    """
    draw, chosen = random.Random(seed), []
    entered = [name for name in sorted(calls) if calls[name]]
    for i in range(number):
        name = entered[i % len(entered)]
        entry = draw.randrange(len(calls[name]))
        chosen.append(Moment(name, entry, draw.randrange(max(1, calls[name][entry])) * 9 // 10))
    return chosen
