"""Commands and code of the README and of docs/ run as written, made small, or say what they need that is not here."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import timm
import yaml
from conftest import ROOT, digits_config, print_config, train, trained_once
from evaluations import digit_images
from programs import Launcher
from safetensors.torch import save_file
from small_training import CLASSIFIER

from uvit_decay.compare.differences import remarks
from uvit_decay.compare.runs import BEST, ENTROPY, KNN, ON_TEST, FinishedRun
from uvit_decay.pictures import save_npz

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = ("LOG.md", "extending.md", "index.md", "CONTRIBUTING.md")  # test_extending.py, test_site.py; these two include
PAGES = [page for page in PAGES if page.name not in OTHERS]
TINY = ["--model.net.dim=16", "--model.net.depth=2", "--model.sampling.steps=3"]
EXAMPLES = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "extending.md").read_text(), re.M | re.S)
PATHS = {  # of a reader, in the workspace
    "FILE": "checkpoints/digits.safetensors",
    "FOLDER": "images",
    "IMAGES": "images.zip",
    "LATENTS": "latents",
    "timm:NAME": "timm:test_vit=vit.safetensors",
}
PROGRAMS = ("sample.py", "evaluate.py", "uvit-decay", "uvit_decay")
TINY_MAE = ["--model.net.dim=16", "--model.net.depth=2", "--data.holdout=0.4"]


def blocks(page: Path | str, language: str) -> list[str]:
    text = page.read_text() if isinstance(page, Path) else page
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: Path | str) -> tuple[list[str], list[str]]:
    """Return the commands of a page that run here, and those that a comment says need something else."""
    lines = [line.partition(" #") for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    needy = [command.strip() for command, _, comment in lines if comment.strip().startswith("needs ")]
    return [command.strip() for command, *_ in lines if command.strip() not in needy], needy


def code_in_tables(page: Path, title: str) -> list[str]:
    """Return the code in the columns of this title of a page's tables, each once."""
    found, column = [], None
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if title in cells:
            column = cells.index(title)
        elif not cells:
            column = None
        elif column is not None:
            found += re.findall(r"`([^`]+)`", cells[column])
    return list(dict.fromkeys(found))


def commands_of_tables(page: Path) -> list[str]:
    """Return the commands in the column `command` of a page's tables that no block of a page has."""
    in_blocks = {command for other in PAGES for command in commands(other)[0]}  # test_commands_run runs these
    found = [command for command in code_in_tables(page, "command") if command.startswith(("python ", "uvit-decay "))]
    return [command for command in found if command not in in_blocks]


def code(*titles: str) -> str:
    """Return the code of these sections of docs/extending.md, one after the other."""
    return "".join(block for title in titles for block in blocks(dict(EXAMPLES)[title], "python"))


def test_pages_are_linked_and_links_lead_somewhere():
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            linked.add((page.parent / target).resolve())
    assert {page.resolve() for page in PAGES} - {ROOT / "README.md"} <= linked


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {})


@pytest.fixture(scope="module")
def workspace(image_dir, vae, tmp_path_factory) -> Path:
    """Return a folder with what the commands name: configs, two runs, images, an autoencoder, samples.

    The runs are the default, tiny, evaluated at steps 15 and 30, and its copy as if of another seed.
    """
    folder = tmp_path_factory.mktemp("workspace")
    for name in ("configs", "train.py", "sample.py", "evaluate.py", "checkpoints"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(image_dir, folder / "images")
    shutil.copytree(vae, folder / "vae")
    shutil.make_archive(str(folder / "images"), "zip", image_dir)
    save_file(timm.create_model("test_vit").state_dict(), folder / "vit.safetensors")
    save_npz(folder / "samples.npz", [digit_images(200, 20.0)], 200)
    probes = {"every_n_steps": 15, "times": [0.1], "max_train": 200, "max_test": 100}
    content = digits_config(LinearProbes=probes, GenerationMetrics={"num": 100, "extractor": CLASSIFIER})
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        trained_once(patch)
        options = [*TINY, "--trainer.log_every_n_steps=1", "--trainer.max_steps=30"]
        train(patch, folder, "fit", "--config=small.yaml", *options)
    run, other = (folder / "runs" / "digits" / f"version_{number}" for number in (0, 1))
    shutil.copytree(run, other)
    config = (run / "config.yaml").read_text()
    assert config.count("seed_everything: 0\n") == 1
    (other / "config.yaml").write_text(config.replace("seed_everything: 0\n", "seed_everything: 1\n"))
    return folder


def smaller(words: list[str]) -> list[str]:
    """Return the command with options that make it quick; the last word wins."""
    if "train.py" in words and "--ckpt_path" in words:
        # As the run of the workspace was made: the default would be evaluated in full at its last step.
        as_before = [*words, "--config=small.yaml", *TINY]
        return [*as_before, "--trainer.max_steps=32"] if "fit" in words else as_before
    if "train.py" in words:
        tiny = TINY_MAE if any("mae" in word for word in words) else TINY
        tiny = tiny[2:] if "--model.init_from" in words else tiny  # sizes are those of the file
        return [*words, *tiny, "--trainer.fast_dev_run=2", "--data.batch_size=4", "--trainer.accelerator=cpu"]
    if "generation" in words and "--ckpt" in words:
        return [*words, "--num=100", "--steps=2"]
    return [*words, "--steps=2", "--num=20"] if "sample.py" in words else words


def run(words: list[str], workspace: Path, programs: Launcher, monkeypatch) -> None:
    """Run a command in the workspace; in this process, unless it starts several."""
    monkeypatch.chdir(workspace)
    if words[:2] == ["torchrun", "--nproc_per_node"]:
        programs.run_ranks(int(words[2]), *words[words.index("--") + 1 :], cwd=workspace)
    elif words[0] == "uvit-decay":
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_module("uvit_decay", run_name="__main__")
    else:
        paths = [str(path) for word in words if "*" in word for path in sorted(workspace.glob(word))]
        monkeypatch.setattr(sys, "argv", [*(word for word in words[1:] if "*" not in word), *paths])
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")


@pytest.mark.slow
def test_compare_reads_what_train_leaves(workspace):
    folders = [workspace / "runs" / "digits" / f"version_{seed}" for seed in (0, 1)]
    runs = [FinishedRun.read(folder) for folder in folders]
    assert [[point["step"] for point in run.evaluations] for run in runs] == [[15, 30]] * 2
    assert runs[0].evaluations[-1]["epoch"] == pytest.approx(30 / 44)  # 1437 digits, 44 whole batches of 32
    assert all(
        run.last[key] > 0 for run in runs for key in (BEST, ON_TEST, "tracked_accuracy", KNN, ENTROPY, "fd", "is")
    )
    assert [line for line in remarks(runs, "model.net.alpha_min") if "0.95" not in line] == []  # so few steps


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)[0]], ids=lambda page: page.stem)
def test_commands_run(page, workspace, programs, monkeypatch, capsys):
    trained_once(monkeypatch)
    for command in commands(page)[0]:
        try:
            run(smaller(shlex.split(command)), workspace, programs, monkeypatch)
        except BaseException as error:
            error.add_note(f"{page.name}: {command}\n{capsys.readouterr().err[-2000:]}")
            raise


SMALL = {  # options that make a command of a table quick, or replace what a hub would give
    "generation": ["--features=small-cnn", "--allow-few", "--image-size=32"],
    "probe": ["--times=0.1", "--max-train=200", "--max-test=100"],
    "classify": ["--protocol=knn"],
    "encode": ["--vae=vae", "--image-size=64"],
    "import": ["--heads=2", "--alpha-min=0.7"],
}


def run_of_table(command: str, workspace: Path, programs: Launcher, monkeypatch, capsys) -> None:
    """Run a command of a table with the paths of the workspace; parse it if it needs hours, a GPU or a download."""
    for name, path in PATHS.items():
        command = command.replace(name, path)
    words = shlex.split(command)
    if words[1] == "train.py" and ("--config" in words or "doctor" in words):
        print_config(monkeypatch, capsys, workspace, *words[2:])
        return
    if words[:2] == ["uvit-decay", "import"]:
        run(["uvit-decay", "export", words[2], "official.pth"], workspace, programs, monkeypatch)
        words[2] = "official.pth"
    task = words[1] if words[0] == "uvit-decay" else words[2]
    run(smaller([*words, *SMALL.get(task, [])]), workspace, programs, monkeypatch)


@pytest.mark.slow
def test_commands_of_the_table_of_the_readme_run(workspace, programs, monkeypatch, capsys):
    found = commands_of_tables(ROOT / "README.md")
    assert len(found) >= 12
    for command in found:
        try:
            run_of_table(command, workspace, programs, monkeypatch, capsys)
        except BaseException as error:
            error.add_note(f"{command}\n{capsys.readouterr().err[-2000:]}")
            raise


def test_benchmarks_of_tables_exist_with_their_options(monkeypatch, capsys):
    for command in commands_of_tables(ROOT / "docs" / "performance.md"):
        _, _, module, *options = shlex.split(command)
        assert find_spec(module), command
        if options:
            monkeypatch.setattr(sys, "argv", [module, *options, "--help"])
            with pytest.raises(SystemExit) as stop:
                runpy.run_module(module, run_name="__main__")
            assert not stop.value.code, command
            assert options[0] in capsys.readouterr().out


@pytest.mark.slow
def test_flags_of_the_table_of_mae_are_understood(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    rows = code_in_tables(ROOT / "docs" / "mae.md", "flags")
    assert len(rows) >= 8
    for flags in rows:
        print_config(
            monkeypatch, capsys, tmp_path, "fit", "--config=configs/imagenet100_mae_b.yaml", *shlex.split(flags)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("title", "section"), EXAMPLES, ids=dict(EXAMPLES))
def test_an_example_of_ones_own_runs_as_printed(title, section, mine, workspace, programs, monkeypatch):
    trained_once(monkeypatch)
    (workspace / "mine.py").write_text(code(title))
    for words in map(shlex.split, commands(section)[0]):
        if "fit" in words:
            rest = words[5:] if words[3:5] == ["--config", "digits"] else words[3:]
            words = [*words[:3], "--config=small.yaml", *TINY, "--trainer.max_steps=3", *rest]
        else:
            words = smaller(words)
        if "early" in words:  # a name of a table that the parser of this process has read before
            programs.run_ranks(1, *words[1:], cwd=workspace)
        else:
            run(words, workspace, programs, monkeypatch)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)[1]], ids=lambda page: page.stem)
def test_options_of_trainings_that_need_more_are_understood(page, tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for command in commands(page)[1]:
        if "train.py" in command and not command.startswith("for "):
            print_config(monkeypatch, capsys, tmp_path, *shlex.split(command)[2:])


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)[1]], ids=lambda page: page.stem)
def test_options_of_other_programs_that_need_more_exist(page, monkeypatch, capsys):
    for command in commands(page)[1]:
        words = shlex.split(command)
        place = next((i for i, word in enumerate(words) if word in PROGRAMS), None)
        if place is None:
            continue
        program, task, flags = words[place], words[place + 1], {word for word in words[place:] if word[:2] == "--"}
        monkeypatch.setattr(sys, "argv", [program, *([] if program == "sample.py" else [task]), "--help"])
        start, where = (runpy.run_path, ROOT / program) if program.endswith(".py") else (runpy.run_module, "uvit_decay")
        with pytest.raises(SystemExit):
            start(str(where), run_name="__main__")
        assert flags - set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) == set(), command


def test_paths_that_the_pages_name_are_there():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "extending.md"]:
        text = page.read_text()
        named = re.findall(r"`((?:uvit_decay|tests|docs|configs|benchmarks)/[\w./-]*)`", text)
        for path in named + re.findall(r"\btests/[\w/]+\.py", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
