"""A resumed run: values of its checkpoint, values of its flags, and refusals."""

import csv

import pytest
import torch
from conftest import leaves, same, tiny_net, tiny_task, tiny_trainer, train
from image_noise import tree, turn, write_zip
from lightning.pytorch.loggers import CSVLogger
from official_files import change_training
from refusals import find_line, raises_user_error, refused
from runs import StopAt, fit
from small_mae import mae_task

from uvit_decay.data import Digits
from uvit_decay.diffusion.noise_path import VP, Linear
from uvit_decay.runs.compatibility import check
from uvit_decay.tasks.base import Optimization

TINY = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=[]", "--trainer.limit_val_batches=0"]


def rates(path):
    with path.open() as file:
        return [float(row["train/lr"]) for row in csv.DictReader(file) if row["train/lr"]]


def find_changes(caplog):
    return [text for text in caplog.messages if "other settings" in text]


def test_flags_of_the_optimizer_win_over_a_checkpoint(trained, tmp_path, monkeypatch):
    flags = ["--model.optim.lr=1e-5", "--model.optim.schedule=constant", "--model.optim.warmup_steps=14"]
    flags += ["--trainer.max_steps=16", "--trainer.log_every_n_steps=1", f"--ckpt_path={trained}", *TINY]
    train(monkeypatch, tmp_path, "fit", *flags)
    actual = rates(tmp_path / "runs" / "digits" / "version_0" / "metrics.csv")
    assert actual == pytest.approx([1e-5 * 13 / 14, 1e-5, 1e-5, 1e-5])


def test_betas_weight_decay_and_fusion_are_those_of_this_run(tmp_path):
    fit(tmp_path / "a", max_steps=3)
    task = tiny_task()
    task.optim = Optimization(1e-3, (0.5, 0.6), 0.1, warmup_steps=10)
    trainer = tiny_trainer(tmp_path / "b", max_steps=5, gradient_clip_val=1.0)
    trainer.fit(task, Digits(32), ckpt_path=tmp_path / "a" / "checkpoints" / "last.ckpt")
    (group,) = trainer.optimizers[0].param_groups
    assert (group["betas"], group["weight_decay"], group["fused"]) == ((0.5, 0.6), 0.1, True)
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {5}


def test_a_longer_cosine_is_followed_from_the_first_step_on(tmp_path):
    whole = fit(tmp_path / "half", StopAt(6), max_steps=8, task=tiny_task(schedule="cosine"))
    assert len(whole[0]) == 6
    logger = CSVLogger(tmp_path, name="rest")
    options = {"logger": logger, "log_every_n_steps": 1, "task": tiny_task(schedule="cosine")}
    fit(tmp_path / "rest", max_steps=20, ckpt_path=tmp_path / "half" / "checkpoints" / "last.ckpt", **options)
    optim = Optimization(1e-3, warmup_steps=10, schedule="cosine")
    actual = rates(tmp_path / "rest" / "version_0" / "metrics.csv")
    assert actual == pytest.approx([1e-3 * optim.factor(step, 20) for step in range(6, 20)])


def test_a_constant_run_is_cooled_down_exactly(tmp_path, monkeypatch, capsys):
    """It ends as a wsd run of the same length: the rates are equal until the cool-down begins."""
    flags = ["--model.optim.warmup_steps=2", "--data.batch_size=8", *TINY]
    flags += ["--trainer.callbacks+=uvit_decay.callbacks.LastCheckpoint", "--trainer.callbacks.keep_every_n_steps=4"]
    cooled = [*flags, "--model.optim.schedule=wsd", "--model.optim.cooldown=3", "--trainer.max_steps=7"]
    (tmp_path / "whole").mkdir()
    train(monkeypatch, tmp_path / "whole", "fit", *cooled)
    train(monkeypatch, tmp_path, "fit", *flags, "--model.optim.schedule=constant", "--trainer.max_steps=5")
    cooled += [f"--ckpt_path={next(tmp_path.glob('runs/**/step_00000004.ckpt'))}"]
    allowed = "[model.optim.schedule,model.optim.cooldown]"
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *cooled)
    find_line(line, "model.optim.schedule constant", "wsd", f"--resume.allow '{allowed}'")
    early = [*cooled, f"--resume.allow={allowed}", "--trainer.max_steps=6"]
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *early)
    find_line(line, "--model.optim.cooldown 3", "begins at 3", "--trainer.max_steps 7")
    train(monkeypatch, tmp_path, "fit", *cooled, f"--resume.allow={allowed}")
    ends = []
    for folder in (tmp_path / "whole" / "runs", tmp_path / "runs"):
        paths = sorted(folder.rglob("last.ckpt"))
        ends.append(torch.load(paths[-1], weights_only=True))
    assert [end["global_step"] for end in ends] == [7, 7]
    assert same(ends[0]["state_dict"], ends[1]["state_dict"])
    states = [dict(leaves(end["optimizer_states"][0]["state"])) for end in ends]
    assert same(*states)
    (middle,) = (tmp_path / "whole").rglob("step_00000004.ckpt")
    shorter = [*cooled[:-2], "--trainer.max_steps=6", f"--ckpt_path={middle}"]
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *shorter)
    find_line(line, "begins at 3", "--trainer.max_steps 7")


def test_a_rate_that_rises_again_after_a_cool_down_is_said(tmp_path, monkeypatch, caplog):
    flags = ["--model.optim.warmup_steps=1", "--model.optim.schedule=wsd", "--model.optim.cooldown=2", *TINY]
    flags += ["--trainer.callbacks+=LastCheckpoint", "--trainer.callbacks.keep_every_n_steps=2", "--ckpt_path=auto"]
    train(monkeypatch, tmp_path, "fit", *flags, "--trainer.max_steps=4")
    assert not [message for message in caplog.messages if "cooled down" in message]
    train(monkeypatch, tmp_path, "fit", *flags, "--trainer.max_steps=6")
    find_line(caplog.messages, "step 4 has cooled down", "up to step 2")


def test_every_other_difference_is_said_in_one_line(tmp_path, monkeypatch, caplog, capsys):
    flags = ["--trainer.max_steps=2", *TINY, "--trainer.callbacks+=uvit_decay.callbacks.LastCheckpoint"]
    train(monkeypatch, tmp_path, "fit", *flags)
    path = "runs/digits/version_0/checkpoints/last.ckpt"
    train(monkeypatch, tmp_path, "fit", *flags, f"--ckpt_path={path}", "--trainer.max_steps=3")
    (line,) = find_changes(caplog)
    find_line(line, "trainer.max_steps 3", 2)
    caplog.clear()
    more = ["--data.batch_size=16", "--seed_everything=1", "--model.label_dropout=0.2", "--model.optim.betas=[0.8,0.9]"]
    flags += [f"--ckpt_path={path}", "--trainer.max_steps=4"]
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *flags, *more)
    names = "model.label_dropout,model.optim.betas,data.batch_size,seed_everything"
    find_line(line, path, "model.label_dropout 0.1", 0.2, "--model.label_dropout 0.1", f"--resume.allow '[{names}]'")
    more += [f"--resume.allow=[{names}]"]
    train(monkeypatch, tmp_path, "fit", *flags, *more)
    (line,) = find_changes(caplog)
    changed = ["data.batch_size 16 (was 32)", "seed_everything 1 (was 0)", "model.label_dropout 0.2 (was 0.1)"]
    for change in (*changed, "model.optim.betas [0.8, 0.9] (was [0.9, 0.99])", "trainer.max_steps 4 (was 3)"):
        assert change in line
    assert line.count("was") == 5


def test_other_images_of_the_same_counts_are_refused_unless_data_is_allowed(tmp_path, monkeypatch, caplog, capsys):
    names = [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(4)]
    folder = tree(tmp_path / "images", names)
    write_zip(folder, tmp_path / "images.zip")
    flags = ["--data=Images", f"--data.path={tmp_path / 'images.zip'}", "--data.image_size=8", "--data.batch_size=4"]
    flags += ["--data.channels=1", "--model.net.num_classes=2", *TINY]
    flags += ["--trainer.callbacks+=uvit_decay.callbacks.LastCheckpoint"]
    train(monkeypatch, tmp_path, "fit", *flags, "--trainer.max_steps=2")
    (path,) = (tmp_path / "runs").rglob("last.ckpt")
    flags += [f"--ckpt_path={path}", "--trainer.max_steps=3"]
    turn(folder / "cat" / "1.png")
    write_zip(folder, tmp_path / "images.zip")
    run = path.parents[1]
    described = [(run / name).read_bytes() for name in ("config.yaml", "launches.jsonl")]
    assert "--resume.allow '[data]'" in refused(capsys, train, monkeypatch, tmp_path, "fit", *flags)
    assert described == [(run / name).read_bytes() for name in ("config.yaml", "launches.jsonl")]
    train(monkeypatch, tmp_path, "fit", *flags, "--resume.allow=data")
    assert len(find_changes(caplog)) == 1


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: tiny_task(tiny_net(time_scale=1000.0)), ("net.time_scale 999.0", "1000.0")),
        (lambda: tiny_task(tiny_net(dim=32)), ("net.dim 16", 32, "`model.net.dim` 16")),
        (lambda: tiny_task(tiny_net(qk_norm=True)), ("net.qk_norm False", "True", "`model.net.qk_norm` false")),
        (lambda: tiny_task(prediction="x"), ("prediction eps", "x", "`model.prediction` eps")),
        (lambda: tiny_task(path=VP(beta_max=10.0)), ("path.beta_max 20.0", "10.0")),
        (lambda: tiny_task(path=Linear()), "path uvit_decay.diffusion.noise_path.VP"),
    ],
)
def test_another_function_is_refused_with_the_flag(trained, task, message):
    with raises_user_error("x", message):
        check(torch.load(trained, weights_only=True), task(), "x")


def test_another_task_is_refused_without_a_list_of_its_options(trained):
    task, contents = mae_task(), torch.load(trained, weights_only=True)
    kinds = (
        {"model.class_path": "tasks.MAETask"},
        {"model.class_path": "tasks.DiffusionTask", "model.label_dropout": 0.1},
    )
    task.settings, contents["settings"] = kinds
    with raises_user_error("x", "tasks.DiffusionTask", "tasks.MAETask"):
        check(contents, task, "x", trains=True)


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_another_function_of_the_same_shapes_leaves_no_folder(trained, tmp_path, monkeypatch, capsys, command):
    flags = [*TINY, f"--ckpt_path={trained}", "--model.net.heads=4"]
    line = refused(capsys, train, monkeypatch, tmp_path, command, *flags)
    find_line(line, "net.heads 2", 4, "--model.net.heads 2")
    assert not list((tmp_path / "runs").rglob("*.yaml"))


def test_old_names_and_left_out_arguments_are_the_same_function(trained, tmp_path):
    def age(contents):
        description = contents["uvit_decay"]
        description["net"]["class_path"] = "uvit_decay.nn.UViT"
        for name in ("time_scale", "branches", "skip", "schedule"):
            del description["net"]["init_args"][name]
        description["net"]["init_args"]["zero_init"] = True  # only how it once began
        del description["weighting"], contents["settings"]

    path = change_training(trained, tmp_path, age)
    assert len(fit(tmp_path / "run", max_steps=13, ckpt_path=path)[0]) == 1
    with raises_user_error("net.time_scale 999.0", "1000.0", "`model.net.time_scale` 999.0"):
        check(torch.load(path, weights_only=True), tiny_task(tiny_net(time_scale=1000.0)), "x")


def test_counters_of_lightning_are_not_those_of_the_file(trained, tmp_path):
    def lose(contents):
        contents["loops"]["fit_loop"].pop("epoch_loop.batch_progress")

    path = change_training(trained, tmp_path, lose)
    runs = [fit(tmp_path / file.stem, max_steps=14, ckpt_path=file) for file in (trained, path)]
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


MOMENTS = ("optimizer_states", 0, "state", 3)
DAMAGE = {  # a place, what becomes of the value there (None: it is gone), and what the line names
    "small moments": ((*MOMENTS, "exp_avg"), lambda v: v.flatten()[:2], "exp_avg"),
    "moments in another order": (("optimizer_states", 0, "param_groups"), lambda v: v * 2, "groups"),
    "bad weights": (("state_dict", "net.norm.bias"), lambda v: v / 0, "net.norm.bias"),
    "more weights": (("state_dict",), lambda v: {**v, "net.x": v["net.alphas"]}, "net.x"),
    "short weights": (("state_dict", "net.norm.bias"), lambda v: v[:2], "net.norm.bias"),
    "bad average": (("callbacks", "EMA", "shadow", "norm.bias"), lambda v: v / 0, "norm.bias"),
    "half an average": (("callbacks", "EMA", "shadow", "norm.bias"), None, "norm.bias"),
    "tensors as words": (("uvit_decay", "prediction"), lambda v: torch.zeros(2), ("prediction", "Tensor")),
    "an odd version": (("pytorch-lightning_version",), lambda v: "new", ("pytorch-lightning_version", "'new'")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_line(trained, name):
    (*outer, last), change, message = DAMAGE[name]
    contents = part = torch.load(trained, weights_only=True)
    for key in outer:
        part = part[key]
    value = part.pop(last)
    if change is not None:
        part[last] = change(value)
    with raises_user_error("x", "damaged", message):
        check(contents, tiny_task(), "x")


@pytest.mark.parametrize(
    ("stored", "ours", "same_weights"),
    [
        ([[1.0, 0.5]] * 6, [[1.0, 0.25]] * 6, False),
        ("constant-branch", [[1.0, 0.5**0.5]] * 6, True),
        ("depth_scaled", [[1.0, 0.5]] * 6, False),
    ],
)
def test_betas_are_compared_as_alphas_are(tmp_path, stored, ours, same_weights):
    """Other betas are refused whatever is allowed; another name of the same ones can be allowed."""
    fit(tmp_path, max_steps=1, task=tiny_task(tiny_net(schedule=stored, alpha_min=1.0)))
    contents = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    task = tiny_task(tiny_net(schedule=ours, alpha_min=1.0))
    task.allowed = ["all"]
    if same_weights:
        check(contents, task, "x", trains=True)
        task.allowed = []
    with raises_user_error("net.schedule"):
        check(contents, task, "x", trains=True)


@pytest.mark.parametrize("schedule", ["learnable", "rezero"])
def test_a_run_with_learned_weights_resumes(tmp_path, schedule):
    task = tiny_task(tiny_net(schedule=schedule, alpha_min=1.0))
    initial = {name: value.clone() for name, value in task.state_dict().items()}
    fit(tmp_path, max_steps=1, task=task)
    contents = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    learned = f"net.{task.net.shortcuts.learned}"
    assert not torch.equal(contents["state_dict"][learned], initial[learned])
    check(contents, tiny_task(tiny_net(schedule=schedule, alpha_min=1.0)), "x", trains=True)
