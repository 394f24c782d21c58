"""The commands of docs/machines.md on two nodes: the numbers of one process."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, digits_config
from PIL import Image
from two_nodes import TwoNodes, can_isolate, two_nodes

from uvit_decay.runs import history

PAGE = (ROOT / "docs" / "machines.md").read_text()
QUICK = ["tests/shared/surroundings.py", "quick"]
CONFIG = "configs/imagenet100_uvit_m.yaml"
KIND = "namespaces" if can_isolate() else "loopback"  # in the names of tests


def command(name: str) -> str:
    """Return the commands of the page under this name."""
    (block,) = re.findall(rf"^```sh {re.escape(name)}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return block


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Return a folder with small versions of what the commands name: CONFIG takes seconds and has all callbacks.

    Its train.py and evaluate.py train the classifier of digits for a few steps only.
    """
    folder = tmp_path_factory.mktemp("work")
    probes = {"every_n_steps": 4, "times": [0.1, 0.2], "max_train": 200, "max_test": 100}
    metrics = {"num": 71}  # no whole number for each process
    content = digits_config(LinearProbes=probes, GenerationMetrics=metrics, Preview={"every_n_steps": 4, "rows": 2})
    content["trainer"] |= {"max_steps": 4, "val_check_interval": 4, "log_every_n_steps": 1}
    content["trainer"]["enable_progress_bar"] = False
    content["model"]["init_args"]["net"]["init_args"] |= {"dim": 16, "depth": 2}
    content["model"]["init_args"]["sampling"]["steps"] = 3
    (folder / "configs").mkdir()
    (folder / CONFIG).write_text(yaml.safe_dump(content))
    for script in ("train.py", "evaluate.py", "sample.py"):
        quick = ROOT / "tests" / "shared" / "surroundings.py"
        started = f"sys.argv[:1] = ['{quick}', os.environ['TEST_HOW'], '{script}']"
        started += f"; runpy.run_path('{quick}', run_name='__main__')"
        (folder / script).write_text(f"import os, runpy, sys\n{started}\n")
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory, work) -> TwoNodes:
    """Yield two nodes, one with a jumping clock; python, torchrun, accelerate and srun are the environment's."""
    programs = tmp_path_factory.mktemp("programs")
    srun = ROOT / "tests" / "shared" / "fake_srun.py"
    (programs / "srun").write_text(f'#!/bin/sh\nexec {sys.executable} {srun} "$@"\n')
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {work}/requeued\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        for node in nodes.nodes:
            how = "quick,jumping-clock" if node.number else "quick"
            node.environment |= {"PATH": path, "PYTHONPATH": str(ROOT), "TEST_HOW": how}
        yield nodes


@pytest.fixture(scope="module")
def alone(work, programs, tmp_path_factory) -> Path:
    """Return the run folder of the same training on one process."""
    folder = tmp_path_factory.mktemp("alone")
    program = programs.start(*QUICK, "train.py", "fit", f"--config={work / CONFIG}", cwd=folder)
    assert program.wait() == 0, program.stderr
    return folder / "runs" / "digits" / "version_0"


def numbers(run: Path) -> dict[str, list]:
    """Return losses and measurements of a run by their names."""
    found: dict[str, list] = {}
    with (run / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name in ("train/loss", "val/loss"):
                if row.get(name):
                    found.setdefault(name, []).append(float(row[name]))
    for name in (history.GENERATION, history.PROBES):
        for measurement in history.read(run / name):
            for key, value in measurement.values.items():
                found.setdefault(f"{name} {key}", []).append(value)
    return found


def assert_same_run(one: Path, two: Path) -> None:
    """Training on two nodes gave what one process gives."""
    alone, both = numbers(one), numbers(two)
    assert alone.keys() == both.keys()
    assert len(both["train/loss"]) == 4
    for name, values in alone.items():
        near = {"abs": 2e-5} if name in ("train/loss", "val/loss") else {"rel": 1e-3}
        assert both[name] == pytest.approx(values, nan_ok=True, **near), name
    files = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (one, two)]
    for ours, theirs in zip(*[(file["state_dict"], file["callbacks"]["EMA"]["shadow"]) for file in files], strict=True):
        for key, value in ours.items():
            torch.testing.assert_close(theirs[key], value, rtol=0, atol=2e-5, msg=key)
    pictures = [np.asarray(Image.open(run / "samples.png")).astype(int) for run in (one, two)]
    assert abs(pictures[0] - pictures[1]).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchrun", "variables", "accelerate"], ids=lambda name: f"{name}-{KIND}")
def test_two_nodes_train_as_one_process_does(two, work, alone, name, exhaustive):
    if not exhaustive:
        pytest.skip("a sample: see the batch script; --exhaustive tries all launchers")
    script = f"{command(name).strip()} --trainer.logger.init_args.experiment {name}"
    for result in two.run(["bash", "-c", script], work):
        assert result.returncode == 0, result.stderr
    assert_same_run(alone, work / "runs" / name / "version_0")


def batch_script(work: Path, *options: str) -> Path:
    """Return the script of the page for sbatch, with an experiment of its own."""
    script = work / "train.sbatch"
    words = " ".join(["--trainer.strategy ddp --trainer.logger.init_args.experiment slurm", *options])
    script.write_text(command("train.sbatch").replace("--trainer.strategy ddp", words))
    return script


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KIND])
def test_a_batch_script_trains_as_one_process_does(two, work, alone, kind):
    (result,) = two.wait([two.batch(batch_script(work), work)])
    assert result.returncode == 0, result.stderr
    assert "MEMBER: 2/2" in result.stderr
    assert_same_run(alone, work / "runs" / "slurm" / "version_0")


TINY = {
    "encode": "--vae vae --image-size 32 --shard-size 4 --batch-size 3 --workers 0",
    "sample": "--num 11 --steps 2 --batch-size 3",
    "generation": "--num 97 --steps 2 --reference digits:train --features digits --metrics fd,is",
    "probe": "--data digits --times 0.1,0.3 --max-train 200 --max-test 100",
}
MADE = {"encode": "latents", "sample": "samples.npz", "generation": "report.json", "probe": "probes"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KIND])
def test_a_batch_job_that_is_warned_saves_and_is_put_into_the_queue_again(two, work, kind, exhaustive):
    if not exhaustive:
        pytest.skip("a sample: --exhaustive warns a job, too")
    running = two.batch(batch_script(work, "--trainer.max_steps 100000"), work)
    running.until("LinearProbes")
    for node in two.nodes:
        for pid in node.processes():
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"python\0train.py"):  # not srun
                os.kill(pid, signal.SIGUSR1)
    (result,) = two.wait([running])
    assert result.returncode == 85, result.stderr
    assert (work / "requeued").read_text().split() == ["requeue", "14500"]
    assert list(work.glob("runs/slurm/*/checkpoints/last.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY, ids=lambda name: f"{name}-{KIND}")
def test_two_nodes_make_what_one_process_makes(two, work, trained, image_dir, vae, programs, name, exhaustive):
    if not exhaustive:
        pytest.skip("a sample: see training; --exhaustive tries the other programs")
    for link, source in {"last.ckpt": trained, "images": image_dir, "vae": vae}.items():
        if not (work / link).exists():
            (work / link).symlink_to(source)
    script = f"{command(f'torchrun-{name}').strip()} {TINY[name]}"
    for result in two.run(["bash", "-c", script], work):
        assert result.returncode == 0, result.stderr
    words = shlex.split(script.partition("$MASTER_PORT")[2].replace("\\\n", " "))
    made = work / MADE[name]
    both = made.rename(made.with_stem(f"both-{name}"))
    words = words if words[0] == "-m" else [*QUICK, *words[1:]]
    program = programs.start(*words, cwd=work)
    assert program.wait() == 0, program.stderr
    one, two = contents(made), contents(both)
    # Metrics differ by the rounding of features, whose batches depend on how many processes share a small set.
    assert two == (pytest.approx(one, rel=1e-9) if name == "generation" else one)


def contents(path: Path) -> object:
    """Return the parts of a file or a folder that are compared."""
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".csv"))
        assert names
        return {name: (path / name).read_bytes() for name in names}
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name].tolist() for name in file.files}
    return json.loads(path.read_text())["values"]
