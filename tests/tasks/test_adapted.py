"""Denoisers and masked autoencoders that start from a file: other classes, channels, image sizes; refusals."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import state, tiny_net, tiny_task, tiny_trainer, train
from hub_folders import write_denoiser
from official_files import change_training, tiny_sit
from PIL import Image
from refusals import find_line, raises_user_error
from runs import configuration, fit
from small_mae import mae_task, small_mae
from timm.layers import resample_abs_pos_embed

from uvit_decay.callbacks import EMA
from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import import_official
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.data import Digits, Images
from uvit_decay.diffusion.noise_path import VP, DDPMLinear, Linear
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.nn import MAE, SiT
from uvit_decay.nn.sizes import SIT_SIZES
from uvit_decay.tasks import DiffusionTask, MAETask
from uvit_decay.tasks.init_from import read_initial

X, T = torch.rand(3, 1, 8, 8), torch.tensor([0.1, 0.5, 0.9])


def small_sit(num_classes=10, **options):
    torch.manual_seed(0)
    options = {"image_size": 8, "channels": 1, "alpha_min": 0.7, "wiring": "decayed", **options}
    return SiT(dim=16, depth=2, heads=2, num_classes=num_classes, **options)


@pytest.fixture(scope="module")
def sit(tmp_path_factory) -> Path:
    """Return a .ckpt of a SiT whose weights are all random."""
    folder, net = tmp_path_factory.mktemp("sit"), small_sit()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    tiny_trainer(folder, max_steps=1).fit(DiffusionTask(net, Linear(), "velocity"), Digits(32))
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Return pictures of the classes 3, 7 and tench."""
    folder = tmp_path_factory.mktemp("pictures")
    for i, name in enumerate(["3", "7", "n01440764"] * 3):
        (folder / name).mkdir(exist_ok=True)
        Image.new("L", (16, 16), 20 * i).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture
def start_task(tmp_path, caplog):
    """Returns the task's network with the weights from which it starts to train, and what is said."""

    def start(task, data):
        tiny_trainer(tmp_path, max_steps=0).fit(task, data)
        said = [record.getMessage() for record in caplog.records if " tensors from " in record.getMessage()]
        return task.net.eval(), said[-1]

    return start


def sit_from(sit, num_classes=3, **options):
    """Return a task that trains a small SiT from the weights of a file."""
    return DiffusionTask(small_sit(num_classes, **options), Linear(), "velocity", init_from=str(sit))


def uvit_from(file, net=None):
    return DiffusionTask(net or tiny_net(), init_from=str(file))


def classes(folder, image_size=8, channels=1):
    return Images(str(folder), image_size=image_size, channels=channels, batch_size=4, flip=False, holdout=0.3)


def test_known_classes_keep_their_labels_and_others_are_new(trained, pictures, start_task):
    fresh, theirs = tiny_net(3), load(trained, "ema").net
    net, line = start_task(uvit_from(trained, tiny_net(3)), classes(pictures))
    find_line(line, "UViT", "ema", "step 12", "label_emb.weight of 2 of 3")
    assert line.endswith("; new: nothing")
    for ours, before in ((0, 3), (1, 7), (3, 10)):
        y = torch.full((3,), ours), torch.full((3,), before)
        assert torch.equal(net(X, T, y[0]), theirs(X, T, y[1]))
    assert torch.equal(net.label_emb.weight[2], fresh.label_emb.weight[2])


def test_an_imported_file_has_as_many_classes_or_others(trained, pictures, tmp_path, start_task):
    unnamed = change_training(trained, tmp_path, lambda contents: contents["uvit_decay"].pop("class_hash"))
    theirs = load(trained, "ema").net.label_emb.weight
    assert torch.equal(start_task(uvit_from(unnamed), Digits(32))[0].label_emb.weight, theirs)
    net, line = start_task(uvit_from(unnamed, tiny_net(3)), classes(pictures))
    assert torch.equal(net.label_emb.weight, torch.cat([tiny_net(3).label_emb.weight[:3], theirs[10:]]))
    find_line(line, "label_emb.weight", "null label", "new: nothing")


def test_positions_of_another_image_size(trained, sit, pictures, start_task):
    net, line = start_task(uvit_from(trained, tiny_net(3, image_size=16)), classes(pictures, 16))
    expected = resample_abs_pos_embed(load(trained).net.pos_embed, [8, 8], num_prefix_tokens=2, antialias=False)
    torch.testing.assert_close(net.pos_embed.detach(), expected, rtol=0, atol=1e-6)
    assert "pos_embed interpolated from 4x4 to 8x8 patches" in line
    net, line = start_task(sit_from(sit, image_size=16), classes(pictures, 16))
    assert torch.equal(net.pos_embed, small_sit(image_size=16).pos_embed)
    assert "pos_embed computed for 8x8 patches" in line


def test_first_and_last_layers_are_new_for_other_channels(trained, sit, pictures, start_task):
    net, line = start_task(uvit_from(trained, tiny_net(3, channels=3)), classes(pictures, channels=3))
    new = ("patch_embed.proj", "decoder_pred", "final_layer")
    assert f"new: {', '.join(f'{name}.{part}' for name in new for part in ('weight', 'bias'))}" in line
    fresh, theirs = tiny_net(3, channels=3).state_dict(), load(trained).net.state_dict()
    for name, value in net.state_dict().items():
        expected = fresh[name] if name.startswith(new) else theirs[name]
        assert name == "label_emb.weight" or torch.equal(value, expected)
    line = start_task(sit_from(sit, channels=3), classes(pictures, channels=3))[1]
    new = ("x_embedder.proj", "final_layer.linear")
    assert f"new: {', '.join(f'{name}.{part}' for name in new for part in ('weight', 'bias'))}" in line


def test_a_network_without_classes_starts_from_one_with_classes(trained, sit, start_task):
    net, line = start_task(uvit_from(trained, tiny_net(0)), Digits(32))
    assert torch.equal(net.pos_embed, load(trained).net.pos_embed[:, 1:])
    assert line.endswith("; new: nothing; left out: label_emb")
    net, line = start_task(sit_from(sit, 0), Digits(32))
    torch.testing.assert_close(net(X, T), load(sit).net(X, T, torch.full((3,), 10)))
    find_line(line, "t_embedder.mlp.2.bias", "new: nothing", "left out: y_embedder")


def test_a_network_with_classes_starts_from_one_without(tmp_path, start_task):
    fit(tmp_path, max_steps=1, task=tiny_task(tiny_net(0)))
    file = tmp_path / "checkpoints" / "last.ckpt"
    net, line = start_task(uvit_from(file), Digits(32))
    assert torch.equal(net.pos_embed[:, 1:], load(file).net.pos_embed)
    assert torch.equal(net.pos_embed[:, :1], tiny_net().pos_embed[:, :1])
    assert torch.equal(net.label_emb.weight, tiny_net().label_emb.weight)
    find_line(line, "pos_embed", "new: label_emb.weight")


@pytest.mark.parametrize("wiring", ["official", "decayed"])
def test_a_masked_autoencoder_of_another_size_and_other_channels(wiring, pictures, tmp_path, start_task):
    fit(tmp_path, max_steps=1, task=mae_task(small_mae(wiring=wiring)))
    file = str(tmp_path / "checkpoints" / "last.ckpt")
    net = MAE(**{**small_mae(wiring=wiring).config, "image_size": 16, "channels": 3, "pixels": "imagenet"})
    fresh = {name: value.clone() for name, value in net.state_dict().items()}
    net, line = start_task(MAETask(net, init_from=file), classes(pictures, 16, 3))
    assert "pos_embed computed for 8x8 patches; decoder_pos_embed computed for 8x8" in line
    assert "; new: patch_embed.proj.weight, patch_embed.proj.bias, decoder_pred.weight, decoder_pred.bias" in line
    theirs = load(Path(file)).net.state_dict()
    for name, value in net.state_dict().items():
        new = name.endswith("pos_embed") or name.startswith(("patch_embed", "decoder_pred"))
        assert torch.equal(value, (fresh if new else theirs)[name])


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: tiny_net(time_scale=1000.0), ("net.time_scale 999.0", "`model.net.time_scale` 999.0")),
        (small_sit, ("net uvit_decay.nn.uvit.UViT", "uvit_decay.nn.sit.SiT")),
    ],
    ids=["times", "class"],
)
def test_another_architecture_or_decay_is_refused_with_the_flag(trained, net, message):
    task = DiffusionTask(net(), init_from=str(trained))
    with raises_user_error(message):
        task.load_initial()


def test_learned_gates_of_another_number_of_tokens_are_refused_with_the_flag(tmp_path):
    gated = {"skip_scale": "learned"}
    tiny_trainer(tmp_path, max_steps=1).fit(tiny_task(tiny_net(**gated)), Digits(32))
    file = tmp_path / "checkpoints" / "last.ckpt"
    for flag, net in (("num_classes", tiny_net(0, **gated)), ("image_size", tiny_net(image_size=16, **gated))):
        with raises_user_error(f"`model.net.{flag}`"):
            read_initial(file, net, tiny_task(net).function_spec())


def test_other_targets_are_a_warning(trained, start_task):
    _, line = start_task(DiffusionTask(tiny_net(), Linear(), "velocity", init_from=str(trained)), Digits(32))
    warning, said = line.splitlines()
    assert warning.startswith("warning")
    find_line(warning, trained, "path", "prediction velocity", "eps")
    assert "new: nothing" in said
    assert "warning" not in start_task(DiffusionTask(tiny_net(), VP(), init_from=str(trained)), Digits(32))[1]


def test_averages_start_from_the_file(trained, tmp_path):
    ema = EMA(0.9)
    task = tiny_task(lr=1e-30, init_from=str(trained))
    tiny_trainer(tmp_path, ema, max_steps=1).fit(task, Digits(32))
    theirs = load(trained, "ema").net.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ema.shadow.items())
    assert torch.equal(state(task)["net.pos_embed"], theirs["pos_embed"])


def test_an_official_file_is_read_as_it_is(tmp_path):
    with torch.device("meta"):
        net = SiT(**SIT_SIZES["sit-s"], num_classes=10, learn_sigma=False)
        layout = SiT(**SIT_SIZES["sit-s"], num_classes=1000).state_dict()
    weights = {name: torch.zeros(value.shape, dtype=torch.bfloat16) for name, value in layout.items()}
    del weights["alphas"]
    torch.save(weights, tmp_path / "SiT-S-2.pt")
    function = DiffusionTask(net, Linear(), "velocity").function_spec()
    stored = read_initial(tmp_path / "SiT-S-2.pt", net, function)
    assert stored.card.prediction == "velocity"
    assert stored.notes[0].startswith("recognised sit-s/2 (6 heads, 32,9")
    torch.save(tiny_sit(), tmp_path / "tiny.pt")
    with raises_user_error("--heads"):
        read_initial(tmp_path / "tiny.pt", net, function)
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    with raises_user_error("U-ViT", "SiT", "MAE"):
        read_initial(tmp_path / "other.pt", net, function)


def test_a_dit_starts_to_train_without_its_variance(tmp_path):
    torch.save(tiny_sit(learn_sigma=True), tmp_path / "official.pt")
    options = ImportOptions(heads=2, path="ddpm-linear")
    import_official(tmp_path / "official.pt", tmp_path / "dit.safetensors", options=options)
    config = load(tmp_path / "dit.safetensors").net.config
    assert config["learned_variance"]
    net = SiT(**{**config, "learned_variance": False})
    function = DiffusionTask(net, DDPMLinear()).function_spec()
    assert read_initial(tmp_path / "dit.safetensors", net, function).card.prediction == "eps"


def test_an_imported_file_may_name_its_classes(pictures, tmp_path, start_task):
    (tmp_path / "classes.txt").write_text("tench, Tinca tinca\n7\ncat\n")
    official, ours = tmp_path / "official.pt", tmp_path / "ours.safetensors"
    torch.save(tiny_sit(), official)
    options = ImportOptions(heads=2, classes=str(tmp_path / "classes.txt"))
    import_official(official, ours, options=options)
    theirs = load(ours).net
    assert load(ours).card.class_names == ("tench, Tinca tinca", "7", "cat")
    net = SiT(**{**theirs.config, "channels": 1})
    net, line = start_task(DiffusionTask(net, Linear(), "velocity", init_from=str(ours)), classes(pictures))
    table, before = (one.y_embedder.embedding_table.weight for one in (net, theirs))
    assert torch.equal(table[[1, 2, 3]], before[[1, 0, 3]])
    find_line(line, "y_embedder.embedding_table.weight of 2 of 3")
    find_line(line, "latents", "pictures0")
    with raises_user_error("official.pt", "3 classes", "`classes` imagenet-1k", 1000):
        import_official(official, tmp_path / "b.safetensors", options=replace(options, classes="imagenet-1k"))


def test_a_run_starts_from_a_file_and_resumes_without_it(trained, tmp_path, monkeypatch, caplog):
    shutil.copy(trained, tmp_path / "start.ckpt")
    config = f"--config={configuration(tmp_path, 'tuned', tiny_task(), init_from='start.ckpt')}"
    train(monkeypatch, tmp_path, "fit", config, "--trainer.max_steps=2")
    (line,) = [line for line in caplog.text.splitlines() if "start.ckpt" in line]
    find_line(line, "UViT", "ema", "step 12", "new: nothing")
    (tmp_path / "start.ckpt").unlink()
    train(monkeypatch, tmp_path, "fit", config, "--trainer.max_steps=3", "--ckpt_path=auto")
    assert caplog.text.count("start.ckpt") == 1
    assert load(tmp_path / "runs/tuned/version_0/checkpoints/last.ckpt").card.step == 3
    with raises_user_error("start.ckpt"):
        DiffusionTask(tiny_net(), init_from="start.ckpt").load_initial()


def test_an_output_skip_can_be_added_but_not_lost(sit, tmp_path, start_task):
    net, said = start_task(sit_from(sit, 10, output_skip="learned"), Digits(32))
    assert "new: output_skip.linear.weight" in said
    before = load(sit).net
    assert torch.equal(net(X, T), before(X, T))
    file = write_denoiser(tmp_path / "skip.safetensors", small_sit(output_skip="learned"), Linear(), "velocity",
                          Sampling(), tuple(map(str, range(10))))  # fmt: skip
    with raises_user_error("`model.net.output_skip`"):
        read_initial(file, small_sit(), sit_from(sit, 10).function_spec())
