"""Latents read and trained on: workers, damaged folders, posterior samples, previews, what does not fit."""

import json
import pickle

import pytest
import torch
from conftest import Losses, save_tiny_vae, tiny_trainer
from latent_files import COUNT, encode, open_set
from PIL import Image

from uvit_decay.callbacks import GenerationMetrics, LinearProbes, Preview
from uvit_decay.checkpoint import load
from uvit_decay.data import Latents
from uvit_decay.data.steps import StepLoader, StepSampler
from uvit_decay.diffusion.generate import Sampling
from uvit_decay.errors import UserError
from uvit_decay.metrics import CustomExtractor
from uvit_decay.nn import UViT
from uvit_decay.tasks import DiffusionTask

# ---- reading


def test_a_set_is_sent_to_workers_by_name_and_reads_the_same_there(encoded):
    stored = open_set(encoded)
    stored[[0, 7, 21]]
    assert len(pickle.dumps(stored)) < 5000
    one, two = (
        list(StepLoader(open_set(encoded), StepSampler(COUNT, 5, 0, 0, 1, True), flip_seed=3, num_workers=workers))
        for workers in (0, 2)
    )
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").unlink(), "holds no latents .* encode <pictures>"),
        (lambda f: (f / "manifest.json").write_text("{}"), "is damaged or no manifest"),
        (lambda f: (f / "manifest.json").write_text("text"), "is damaged or no manifest"),
        (lambda f: edit(f, version=2), "has layout version 2, this program reads 1"),
        (lambda f: edit(f, statistics=None), "6 of 6 shards are encoded; run the same"),
        (lambda f: edit(f, count=23), "22 labels, the manifest 23"),
        (lambda f: (f / "labels.safetensors").unlink(), "labels.safetensors is missing"),
        (lambda f: (f / "shard-00003-of-00006.safetensors").unlink(), "shard-00003-of-00006.safetensors is missing"),
        (lambda f: (f / "shard-00003-of-00006.safetensors").write_bytes(b"x" * 99), "cut short: delete it"),
        (lambda f: (f / "shard-00003-of-00006.safetensors").write_bytes(b"x" * 99999), "cut short or not of this"),
        (lambda f: edit(f, image_size=16), r"holds \(4, 2, 8, 4, 4\), the manifest says \(4, 2, 8, 2, 2\)"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(encoded, tmp_path, damage, message):
    for path in encoded.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        open_set(tmp_path)[list(range(COUNT))]


def edit(folder, **values):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- training


def latent_task(**options):
    torch.manual_seed(0)
    net = UViT(4, 2, 4, dim=16, depth=2, heads=2, num_classes=2, alpha_min=0.7, init="xavier")
    return DiffusionTask(net, sampling=Sampling("dpm++", 3), **options)


def fit(folder, data, *callbacks, max_steps=4, ckpt_path=None):
    losses, task = Losses(), latent_task()
    tiny_trainer(folder, losses, *callbacks, max_steps=max_steps, limit_val_batches=1).fit(
        task, data, ckpt_path=ckpt_path
    )
    return losses.values, folder / "checkpoints" / "last.ckpt"


def test_training_draws_the_posterior_and_the_mirror_anew_and_repeats_exactly(encoded, tmp_path):
    data = [Latents(str(encoded), batch_size=11, num_workers=workers) for workers in (0, 1)]
    first, second = (fit(tmp_path / str(i), each) for i, each in enumerate(data))
    assert first[0] == second[0]
    frozen = Latents(str(encoded), batch_size=11, num_workers=0)
    frozen.on_after_batch_transfer = lambda batch, _: batch._replace(images=frozen.network_input(batch.images))
    assert fit(tmp_path / "mean", frozen)[0] != first[0]
    assert fit(tmp_path / "plain", Latents(str(encoded), batch_size=11, num_workers=0, flip=False))[0] != first[0]


def test_previews_and_probes_work_on_latents(encoded, tmp_path):
    data = Latents(str(encoded), str(encoded), batch_size=11, num_workers=0)
    fit(tmp_path, data, Preview(rows=2), LinearProbes(times=(0.1,)))
    with Image.open(tmp_path / "samples.png") as grid:
        assert len(grid.getcolors(maxcolors=100_000)) > 10
    assert (tmp_path / "probes.csv").read_text().count("\n") == 5


class Colours(torch.nn.Module):
    """64 features: the mean colours of 16 places, and a constant."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        places = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, [4, 4]).flatten(1)
        return torch.cat([places, places[:, :16]], 1)


def test_samples_of_latents_are_judged_decoded_against_pictures(encoded, pictures, tmp_path):
    torch.jit.script(Colours()).save(tmp_path / "colours.pt")
    data = Latents(str(encoded), batch_size=11, num_workers=0)
    judged = {"num": 12, "reference": str(pictures), "allow_few": True}
    with pytest.raises(UserError, match="latents need a reference"):
        fit(tmp_path / "without", data, GenerationMetrics(CustomExtractor(str(tmp_path / "colours.pt")), num=12))
    fit(tmp_path, data, GenerationMetrics(CustomExtractor(str(tmp_path / "colours.pt")), **judged))
    (found,) = json.loads((tmp_path / "generation.json").read_text())
    assert found["fid"] > 0
    assert (found["samples"]["size"], found["reference"]["size"]) == ("32x32", "32x32")
    assert any("not Inception's" in remark for remark in found["remarks"])


def test_a_checkpoint_goes_on_only_with_latents_of_its_own_autoencoder(encoded, pictures, vae, tmp_path):
    _, checkpoint = fit(tmp_path / "a", Latents(str(encoded), batch_size=11, num_workers=0))
    fit(tmp_path / "b", Latents(str(encoded), batch_size=11, num_workers=0), max_steps=6, ckpt_path=checkpoint)
    other = encode(pictures, tmp_path / "other", save_tiny_vae(tmp_path / "vae", seed=1))
    with pytest.raises(UserError, match="the checkpoint has latents with sha256 .* other "):
        fit(tmp_path / "c", Latents(str(other), batch_size=11, num_workers=0), max_steps=6, ckpt_path=checkpoint)


@pytest.mark.parametrize("change", [lambda latents: latents.update(groups=2), lambda latents: latents.pop("scale")])
def test_a_checkpoint_of_another_version_is_refused_in_one_line_by_training_and_by_sampling(encoded, tmp_path, change):
    data = Latents(str(encoded), batch_size=11, num_workers=0)
    _, path = fit(tmp_path / "a", data)
    contents = torch.load(path, weights_only=True)
    change(contents["uvit_decay"]["latents"])
    torch.save(contents, path)
    for use in (lambda: fit(tmp_path / "b", data, max_steps=6, ckpt_path=path), lambda: load(path)):
        with pytest.raises(
            UserError, match=r"was written by another version of this project: .*(groups|scale)"
        ) as error:
            use()
        assert "\n" not in str(error.value)


def test_latents_that_do_not_fit_the_config_are_refused_with_both_values(encoded, pictures, vae, tmp_path):
    with pytest.raises(UserError, match=r"of its folders \(sha256 \w+\), the config wants imagenet-100/cmc \(\w+\)"):
        Latents(str(encoded), classes="imagenet-100/cmc", batch_size=11).load()
    larger = encode(pictures, tmp_path / "larger", vae, "--image-size", "64")
    with pytest.raises(UserError, match="image_size 32, .*larger 64"):
        Latents(str(encoded), str(larger), batch_size=11).load()
    with pytest.raises(UserError, match="the data have image_size 8, the network 4"):
        fit(tmp_path / "fit", Latents(str(larger), batch_size=11, num_workers=0))
    with pytest.raises(UserError, match="holds no latents"):
        Latents(str(tmp_path / "nothing")).load()
