"""sample.py as a user runs it: which images it makes, where they go, and what it refuses."""

import argparse
import json
import runpy
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_net, tiny_task, tiny_trainer
from PIL import Image

from uvit_decay.data import Digits
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.nn import SiT
from uvit_decay.samples import Samples
from uvit_decay.sampling_options import add_sampling_options, chosen_sampling


def sample(monkeypatch, folder, *args):
    """`python sample.py ...` in this process, in `folder`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "sample.py"), *map(str, args)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def pixels(path):
    return np.load(path)["arr_0"]


def test_help_imports_no_more_than_it_needs():
    code = "import sys; sys.argv = ['sample.py', '--help']; import runpy\n"
    code += f"try: runpy.run_path({str(ROOT / 'sample.py')!r}, run_name='__main__')\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("False")


def test_the_readme_shows_what_the_bundled_checkpoint_makes(tmp_path, monkeypatch):
    sample(monkeypatch, tmp_path)
    found, shown = (np.asarray(Image.open(path), float) for path in ("samples.png", ROOT / "docs/digits_samples.png"))
    assert abs(found - shown).mean() < 0.1


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_ten_images_are_the_same_with_batch_sizes_1_3_and_10(trained, tmp_path, monkeypatch, sampler):
    for size in (1, 3, 10):
        args = ["--ckpt", trained, "--num", 10, "--batch-size", size, "--sampler", sampler, "--steps", 4]
        sample(monkeypatch, tmp_path, *args, "--out", f"{size}.npz")
    one, three, ten = (pixels(tmp_path / f"{size}.npz") for size in (1, 3, 10))
    assert one.shape == (10, 8, 8, 1)
    assert np.array_equal(one, three)
    assert np.array_equal(one, ten)


def test_image_i_does_not_depend_on_how_many_are_asked_for_but_on_seed_and_class(trained, tmp_path, monkeypatch):
    base = ["--ckpt", trained, "--classes", "3"]
    for name, args in {
        "few": ["--num", 2],
        "many": ["--num", 5],
        "seed": ["--num", 2, "--seed", 8],
        "class": ["--num", 2, "--classes", "4"],
        "raw": ["--num", 2, "--weights", "raw"],
    }.items():
        sample(monkeypatch, tmp_path, *base, *args, "--out", f"{name}.npz")
    few = pixels(tmp_path / "few.npz")
    assert np.array_equal(few, pixels(tmp_path / "many.npz")[:2])
    for other in ("seed", "class", "raw"):
        assert not np.array_equal(few, pixels(tmp_path / f"{other}.npz"))


def test_the_command_of_the_readme_makes_a_grid(trained, tmp_path, monkeypatch):
    options = "--num 64 --classes 0,1,2 --guidance 2 --sampler dpm++ --steps 25 --seed 7 --out new/grid.png"
    sample(monkeypatch, tmp_path, "--ckpt", trained, *options.split())
    grid = Image.open(tmp_path / "new" / "grid.png")
    assert grid.size == (9 * 68 + 4, 22 + 8 * 68 + 4)  # 9 columns of 3 classes, 8 rows


def test_a_folder_holds_numbered_pngs_equal_to_the_array(trained, tmp_path, monkeypatch):
    sample(monkeypatch, tmp_path, "--ckpt", trained, "--num", 12, "--out", "images")
    sample(monkeypatch, tmp_path, "--ckpt", trained, "--num", 12, "--out", "array.npz")
    names = sorted(path.name for path in (tmp_path / "images").glob("*.png"))
    assert names == [f"{i:06d}.png" for i in range(12)]
    read = np.stack([np.asarray(Image.open(tmp_path / "images" / name)) for name in names])
    assert np.array_equal(read[..., None], pixels(tmp_path / "array.npz"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--classes", "10"], "this checkpoint has the classes 0 to 9"),
        (["--classes", "-1"], "this checkpoint has the classes 0 to 9"),
        (["--classes", "cat"], "--classes takes numbers"),
        (["--num", "0"], "at least 1"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--out", "b.jpg"], "a .png (grid), an .npz (array) or a folder"),
        (["--out", "full"], "the folder is not empty"),
        (["--batch-size", "0"], "at least 1"),
        (["--steps", "0"], "steps must lie between 1 and 1000"),
        (["--sampler", "magic"], "unknown sampler 'magic'"),
        (["--guidance", "nan"], "guidance must be a number"),
        (["--processes", "0"], "--processes must be at least 1"),
        (["--processes", "2"], "--processes asks for 2 processes, but this program has 1"),
        (["--num", "10001"], "a grid takes at most 10000 images"),
        (["--device", "nowhere"], "--device nowhere"),
        (["--device", "meta"], "--device meta"),
        (["--device", "hpu"], "--device hpu"),  # whose package is not installed
        (["--out", "/proc/no/where.png"], "cannot write"),
        (["--ckpt", "missing.ckpt"], "does not exist"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(trained, tmp_path, monkeypatch, capsys, args, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old.png").touch()
    with pytest.raises(SystemExit) as stop:
        sample(monkeypatch, tmp_path, "--ckpt", trained, *args)
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_guidance_and_classes_on_an_unconditional_checkpoint_are_refused(tmp_path, monkeypatch, capsys):
    tiny_trainer(tmp_path, max_steps=1).fit(tiny_task(tiny_net(num_classes=0)), Digits(32))
    ckpt = tmp_path / "checkpoints" / "last.ckpt"
    for args, message in (
        (["--guidance", "2"], "unconditional: use guidance 1"),
        (["--classes", "1"], "leave out --classes"),
        (["--labels", "random"], "leave out --labels"),
    ):
        with pytest.raises(SystemExit) as stop:
            sample(monkeypatch, tmp_path, "--ckpt", ckpt, *args)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    sample(monkeypatch, tmp_path, "--ckpt", ckpt, "--num", 3)


def test_the_bundled_checkpoint_is_what_its_card_says(tmp_path, monkeypatch):
    import hashlib

    import yaml

    card = yaml.safe_load((ROOT / "checkpoints" / "cards.yaml").read_text())["digits"]
    path = ROOT / "checkpoints" / card["file"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == card["sha256"]
    assert path.stat().st_size < 4 * 2**20
    sample(monkeypatch, tmp_path, "--num", 20)
    assert (tmp_path / "samples.png").exists()


@pytest.mark.parametrize("out", ["samples.png", "samples.npz", "images"])
def test_images_that_are_not_finite_are_not_written(trained, tmp_path, monkeypatch, capsys, out):
    contents = torch.load(trained, weights_only=True)
    contents["callbacks"]["EMA"]["shadow"]["decoder_pred.weight"].fill_(3e38)
    torch.save(contents, tmp_path / "diverged.ckpt")
    with pytest.raises(SystemExit) as stop:
        sample(monkeypatch, tmp_path, "--ckpt", "diverged.ckpt", "--num", 2, "--out", out)
    assert stop.value.code == 2
    assert "error: the images hold NaN or infinite values" in capsys.readouterr().err
    there = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert there <= {"diverged.ckpt", "sampling.json"}  # the latter says what the folder was to hold


def test_an_autoencoder_is_refused_where_there_is_nothing_to_decode(trained, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        sample(monkeypatch, tmp_path, "--ckpt", trained, "--vae", "somewhere")
    assert "this checkpoint makes pixels" in capsys.readouterr().err


def test_the_checkpoints_own_sampler_keeps_its_steps_when_it_is_named(trained, tmp_path, monkeypatch, capsys):
    for flags, wanted in ((["dpm++"], "dpm++4_w2"), (["dpm++", "--steps", "3"], "dpm++3_w2"), (["ddim"], "ddim25_w2")):
        sample(monkeypatch, tmp_path, "--ckpt", trained, "--num", "1", "--sampler", *flags)
        assert wanted in capsys.readouterr().err


def test_a_grid_is_as_wide_as_its_images(trained, tmp_path, monkeypatch):
    sample(monkeypatch, tmp_path, "--ckpt", trained, "--num", "3")
    assert Image.open(tmp_path / "samples.png").size == (3 * 68 + 4, 22 + 68 + 4)


def tiny_sit_checkpoint(folder):
    """A .ckpt of a few steps of a decayed SiT on velocities."""
    net = SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10, alpha_min=0.8, wiring="decayed")
    task = tiny_task(net, path=Linear(), prediction="velocity")
    tiny_trainer(folder, max_steps=3).fit(task, Digits(32))
    return folder / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    ("flags", "calls"),
    [
        (["--sampler", "sit-sde", "--steps", "250"], 250),
        (["--sampler", "sit-sde"], 250),
        (["--sampler", "sit-ode"], 250),
        (["--sampler", "sit-ode", "--steps", "10", "--guidance", "2"], 20),
    ],
)
def test_a_sit_is_evaluated_as_often_as_its_sampler_says(tmp_path, monkeypatch, flags, calls):
    checkpoint, sizes = tiny_sit_checkpoint(tmp_path), []

    def count(module, args, output) -> None:
        if isinstance(module, SiT):
            sizes.append(len(args[0]))

    handle = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        sample(monkeypatch, tmp_path, "--ckpt", checkpoint, "--num", "3", "--guidance", "1", *flags)
    finally:
        handle.remove()
    assert sizes[2:] == [6 if "2" in flags else 3] * calls  # the first two find out what it costs
    assert (tmp_path / "samples.png").exists()


def test_guidance_can_be_kept_to_some_times(trained, tmp_path, monkeypatch, capsys):
    flags = ["--ckpt", trained, "--num", "3", "--sampler", "euler", "--steps", "6"]
    for out, scale, interval in (("no", "1", "0,1"), ("some", "3", "0.3,0.7"), ("all", "3", "0,1")):
        guided = ["--guidance", scale, "--guidance-interval", interval]
        sample(monkeypatch, tmp_path, *flags, *guided, "--out", f"{out}.npz")
    no, some, every = (pixels(tmp_path / f"{name}.npz") for name in ("no", "some", "all"))
    assert not np.array_equal(no, some)
    assert not np.array_equal(some, every)
    with pytest.raises(SystemExit):
        sample(monkeypatch, tmp_path, *flags, "--guidance-interval", "often")
    assert "takes two times such as 0.1,0.6" in capsys.readouterr().err


def test_clipping_is_asked_for_and_named(trained, tmp_path, monkeypatch, capsys):
    base = ["--ckpt", trained, "-n", "3", "--steps", "2", "--guidance", "9"]
    cases = {"plain": ["dpm++"], "no": ["dpm++", "--no-clip"], "paper": ["uvit-dpm"], "clip": ["uvit-dpm", "--clip"]}
    names = {"plain": "dpm++2_w9", "no": "dpm++2_w9_noclip", "paper": "uvit-dpm2_w9", "clip": "uvit-dpm2_w9_clip"}
    made = {}
    for case, flags in cases.items():
        sample(monkeypatch, tmp_path, *base, "--sampler", *flags, "--out", f"{case}.npz")
        assert f"{names[case]}, ema" in capsys.readouterr().err
        made[case] = pixels(tmp_path / f"{case}.npz")
    assert not np.array_equal(made["plain"], made["no"])
    assert not np.array_equal(made["paper"], made["clip"])


@pytest.mark.parametrize(
    ("flags", "clips"),
    [([], True), (["--sampler", "uvit-em"], False), (["--no-clip"], False), (["--sampler", "uvit-em", "--clip"], True)],
)
def test_a_description_says_whether_pixels_are_clipped(trained, options, flags, clips):
    assert Samples.from_options(trained, options(*flags)).describe()["clip"] is clips


def test_an_array_has_the_classes_of_its_images(trained, tmp_path, monkeypatch):
    sample(monkeypatch, tmp_path, "--ckpt", trained, "-n", "5", "--steps", "2", "--classes", "3,1", "--out", "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        assert file["arr_1"].dtype == np.int64
        assert file["arr_1"].tolist() == [3, 1, 3, 1, 3]


def test_precision_is_chosen_and_refused_in_one_line(trained, tmp_path, monkeypatch, capsys):
    args = ["--ckpt", trained, "-n", "4", "--steps", "3", "--batch-size", "2"]
    sample(monkeypatch, tmp_path, *args, "--out", "full.npz")
    sample(monkeypatch, tmp_path, *args, "--precision", "bf16", "--out", "half.npz")
    assert "_bf16" in capsys.readouterr().err
    full, half = (pixels(tmp_path / name).astype(int) for name in ("full.npz", "half.npz"))
    assert 0 < abs(full - half).mean() < 20
    with pytest.raises(SystemExit) as stopped:
        sample(monkeypatch, tmp_path, *args, "--precision", "tf32", "--device", "cpu", "--out", "none.npz")
    assert stopped.value.code == 2
    assert "precision tf32 is of CUDA GPUs" in capsys.readouterr().err


def test_a_long_wait_is_announced(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("uvit_decay.samples.estimated_seconds", lambda source, evaluations, *_: evaluations)
    sample(monkeypatch, tmp_path, "--ckpt", trained, "-n", "30", "--steps", "2", "--guidance", "2")
    wanted = "30 images, each 2 network evaluations, take about 2 min: --sampler and --steps change that"
    assert wanted in capsys.readouterr().err
    sample(monkeypatch, tmp_path, "--ckpt", trained, "-n", "30", "--steps", "2", "--guidance", "1")
    assert "about" not in capsys.readouterr().err


def test_killed_in_the_middle_it_leaves_no_array(trained, tmp_path):
    command = [sys.executable, ROOT / "sample.py", "--ckpt", trained, "--num", 10**6, "--out", "samples.npz"]
    process = subprocess.Popen([str(word) for word in command], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert [path.name for path in tmp_path.glob("*.npz")] == []


@pytest.fixture
def options():
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    return lambda *words: parser.parse_args(words)


def test_images_are_a_source_that_says_what_it_is(trained, options):
    sampled = Samples.from_options(trained, options("--steps", "3", "--guidance", "2", "--seed", "5"))
    assert sampled.shape == (1, 8, 8)
    assert sampled.labels([9, 10, 13]) == [9, 0, 3]
    together = sampled.images(range(7, 10))
    assert (together.dtype, tuple(together.shape)) == (torch.uint8, (3, 1, 8, 8))
    assert sampled.nfe == 3 * 3 * 2
    assert torch.equal(together[1:], sampled.images([8, 9]))
    assert sampled.name() == "ema_dpm++3_w2_seed5"
    described = json.loads(json.dumps(sampled.describe()))
    wanted = {
        "step": 12,
        "weights": "ema",
        "sampler": "dpm++",
        "steps": 3,
        "nfe": 3,
        "guidance": 2.0,
        "seed": 5,
    }
    assert wanted.items() <= described.items()
    assert described["labels"] == "all 10 classes in turn"
    some = Samples.from_options(trained, options("--classes", "1,2", "--weights", "raw"))
    assert some.describe()["labels"] == "classes 1,2 in turn"
    assert some.name() == "raw_dpm++4_w2_seed0_classes1-2"


@pytest.mark.parametrize("classes", [[], ["--classes", "7,2,5"]])
def test_random_labels_are_functions_of_seed_and_number(trained, options, classes):
    flags = ["--steps", "2", "--labels", "random", *classes]
    sampled = Samples.from_options(trained, options(*flags))
    found = sampled.labels(range(3000))
    assert sampled.labels([2999, 5]) == [found[2999], found[5]]
    assert found != Samples.from_options(trained, options(*flags, "--seed", "1")).labels(range(3000))
    wanted = [2, 5, 7] if classes else list(range(10))
    counts = np.array([found.count(label) for label in wanted])
    assert counts.sum() == 3000
    assert 0 < ((counts - 3000 / len(wanted)) ** 2 / (3000 / len(wanted))).sum() < 30  # chi square, 9 or 2 degrees
    alone = Samples.from_options(trained, options("--steps", "2", "--classes", str(found[5])))
    assert torch.equal(sampled.images([5]), alone.images([5])), "the image is of its label"
    assert "_random-labels" in sampled.name()
    assert sampled.describe()["labels"].endswith("at random")


def test_another_sampler_than_the_checkpoints_clips_as_it_does(options):
    stored = Sampling("dpm++", 4, 2.0, clip=True)
    given = chosen_sampling(options("--sampler", "uvit-dpm"), stored.sampler)
    assert replace(stored, **given).name == "uvit-dpm50_w2"
    assert replace(stored, **chosen_sampling(options("--steps", "5"), stored.sampler)).clip is True


@pytest.mark.parametrize(
    ("flags", "drawn"),
    [
        ([], False),
        (["--sampler", "ddim"], False),
        (["--sampler", "uvit-em"], True),
        (["--sampler", "uvit-dpm", "--labels", "balanced"], False),
        (["--labels", "random"], True),
    ],
)
def test_the_papers_samplers_draw_labels_but_for_a_grid(trained, options, tmp_path, monkeypatch, flags, drawn):
    sampled = Samples.from_options(trained, options(*flags))
    assert (sampled.labels(range(20)) != [*range(10)] * 2) is drawn
    assert ("random-labels" in sampled.name()) is drawn
    base = ["--ckpt", trained, "-n", "20", "--steps", "1", *flags]
    sample(monkeypatch, tmp_path, *base, "--out", "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        assert file["arr_1"].tolist() == sampled.labels(range(20))
    sample(monkeypatch, tmp_path, *base, "--out", "grid.png")
    in_columns = "random" not in flags
    assert (Image.open(tmp_path / "grid.png").size == (10 * 68 + 4, 22 + 2 * 68 + 4)) is in_columns, "named columns"


def test_names_tell_long_lists_of_classes_and_autoencoders_apart(trained, options):
    sampled = Samples.from_options(trained, options())
    lists = [[0, *range(10)], [1, *range(10)], [*range(10), 0]]
    latent = replace(sampled.found, latents={"vae": "stabilityai/sd-vae-ft-ema"})
    others = [replace(sampled, found=latent, vae=vae) for vae in (latent.latents["vae"], "elsewhere/sd-vae-ft-mse")]
    names = [made.name() for made in (sampled, *(replace(sampled, classes=classes) for classes in lists), others[1])]
    assert len(set(names)) == len(names)
    assert others[0].name() == sampled.name()
    assert names[-1].endswith("_vae-sd-vae-ft-mse")


def test_thinking_about_the_cost_is_no_network_call_and_changes_no_threads(trained, options):
    sampled, threads = Samples.from_options(trained, options()), torch.get_num_threads()
    assert 0 < sampled.seconds(100, 64) < 60
    assert sampled.nfe == 0
    assert torch.get_num_threads() == threads
