"""README.md of exported folders: metadata of the Hub, numbers of these weights alone, a grid, the licence."""

import json
import math
import os
import re
from dataclasses import replace

import pytest
import torch
import yaml
from hub_folders import BUNDLED, own_modules, sampled, stacked, write_denoiser  # noqa: F401
from huggingface_hub import ModelCard
from PIL import Image

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.__main__ import main
from uvit_decay.checkpoint.convert import import_official
from uvit_decay.checkpoint.official.common import ImportOptions
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.history import GENERATION, PROBES, Measurement, append
from uvit_decay.hub.card import cell, model_card
from uvit_decay.hub.folder import export_folder
from uvit_decay.hub.measured import of_report
from uvit_decay.hub.options import CardOptions
from uvit_decay.image_io import labelled_grid
from uvit_decay.nn import SiT, UViT
from uvit_decay.runtime.errors import UserError

STEP = 3  # of the small checkpoints
SAMPLES = {"name": "ema_euler3_seed1", "weights": "ema", "sampler": "euler", "steps": 3, "guidance": 1.0, "seed": 1}
GENERATED = {
    "n": 1000,
    "samples": SAMPLES,
    "reference": {"name": "digits-train", "n": 1437},
    "extractor": "small-cnn-4e53434d7f4c",
    "remarks": ["features of small-cnn, not Inception's: no FID of papers compares"],
}
BEST = {"layer": 1, "name": "mid_block", "kind": "middle", "t": 0.1, "test_accuracy": 0.9, "knn_accuracy": 0.8}
PROBED = {"data": "digits", "train": 1437, "neighbours": 20, "weights": "ema", "best": BEST}
WITHOUT_GRID = CardOptions(grid=False)


def small(file, **options):
    net = UViT(8, 2, 1, dim=16, depth=2, heads=2, alpha_min=0.7, **options)
    names = tuple(f"class {i}" for i in range(net.num_classes))
    return write_denoiser(file, net, VP(0.2, 15.0), "eps", Sampling("euler", 3), names)


def exported(file, folder, **options):
    export_folder(file, folder, card=replace(WITHOUT_GRID, **options))
    return ModelCard.load(folder / "README.md")


@pytest.fixture
def run(tmp_path):
    """A run folder with a checkpoint of step 3 and measurements at steps 2 and 3."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    net = {"class_path": "uvit_decay.nn.UViT", "init_args": {"dim": 16}}
    optim, data = {"lr": 0.003, "betas": [0.9, 0.99]}, {"path": "/home/me/secret/pictures", "batch_size": 32}
    configuration = {"model": {"init_args": {"net": net, "optim": optim, "init_from": "/home/me/first.safetensors"}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration | {"data": {"init_args": data}}))
    for step, fid in ((2, 50.0), (STEP, 12.345678)):
        values = {"fid": fid, "is": 1.5, "is_std": 0.25, "kid": math.nan}
        append(folder / GENERATION, Measurement(step, 1.0, 96, values, GENERATED))
        append(folder / PROBES, Measurement(step, 1.0, 96, {"best_accuracy": 0.9}, PROBED))
    small(folder / "checkpoints" / "last.safetensors")
    return folder


def test_numbers_of_the_run_are_machine_readable(run, tmp_path):
    card = exported(run / "checkpoints" / "last.safetensors", tmp_path / "digits")
    found = {result.metric_type: result for result in card.data.eval_results}
    assert {name: result.metric_value for name, result in found.items()} == {
        "fid": 12.345678,
        "is": 1.5,
        "test_accuracy": 0.9,
        "knn_accuracy": 0.8,
    }
    fid, accuracy = found["fid"], found["test_accuracy"]
    assert (fid.dataset_name, fid.task_type) == ("digits-train", "unconditional-image-generation")
    expected = {"n": 1000, "extractor": "small-cnn-4e53434d7f4c", "reference.n": 1437, "step": STEP, "sampler": "euler"}
    assert expected.items() <= fid.metric_args.items()
    for words in ("FID (", "n 1000", "sampler euler", "steps 3", "guidance 1.0", "weights ema", "seed 1", "step 3"):
        assert words in fid.metric_name
    assert (accuracy.dataset_name, accuracy.task_type) == ("digits", "image-classification")
    assert "features after mid_block, layer 1, kind middle, t 0.1" in accuracy.metric_name
    assert "| FID | 12.35 |" in card.text
    assert "| Inception Score | 1.50 ± 0.25 |" in card.text
    assert "50.00" not in card.text
    assert "not Inception's: no FID of papers compares" in card.text


def test_metadata_and_facts(run, tmp_path):
    card = exported(run / "checkpoints" / "last.safetensors", tmp_path / "digits", license="cc-by-4.0")
    about = card.data
    assert (about.library_name, about.pipeline_tag) == ("diffusers", "unconditional-image-generation")
    assert about.license == "cc-by-4.0"
    assert {"uvit", "decayed-identity-shortcuts", "unconditional"} <= set(about.tags)
    assert "from 1 to 0.7 over 6 residual branches" in card.text
    assert "| noise path | path VP, beta_min 0.2, beta_max 15.0 |" in card.text
    assert "| weights | ema, after 3 optimizer steps |" in card.text
    assert "| `model.optim.lr` | 0.003 |" in card.text
    assert "| `data.batch_size` | 32 |" in card.text
    assert "| `model.init_from` | first.safetensors |" in card.text
    assert "/home" not in card.content
    assert "secret" not in card.content


def test_every_table_is_whole(run, tmp_path):
    card = exported(run / "checkpoints" / "last.safetensors", tmp_path / "digits")
    for block in re.split(r"\n\n+", card.text):
        lines = block.strip().splitlines()
        if lines and lines[0].startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, block
            assert set(lines[1]) <= set("| -")


def test_the_example_runs_and_the_grid_is_that_of_sample(tmp_path, monkeypatch):
    folder = tmp_path / "digits"
    export_folder(BUNDLED, folder)
    card = ModelCard.load(folder / "README.md")
    assert "![samples, seed 0](samples.png)" in card.text
    images = sampled(BUNDLED, range(40)).transpose(0, 3, 1, 2)
    shown = labelled_grid(torch.tensor(images), 10, [str(i) for i in range(10)])
    assert Image.open(folder / "samples.png").tobytes() == shown.tobytes()
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], scope)
    assert (stacked(scope["images"]) == sampled(BUNDLED, range(4))).all()
    export_folder(BUNDLED, folder, card=WITHOUT_GRID)
    assert not (folder / "samples.png").exists()
    assert "samples.png" not in (folder / "README.md").read_text()


def test_reports_are_of_these_weights_or_refused(tmp_path):
    file = small(tmp_path / "net.safetensors", num_classes=2)
    protocol = {**GENERATED, "samples": {**SAMPLES, "step": STEP, "checkpoint": "/home/me/last.ckpt"}}
    del protocol["remarks"]
    generation = {"metrics": {}, "values": {"fid": 3.5}, "protocol": protocol, "remarks": ["1,000 samples"]}
    probe = {"best": BEST, "protocol": {**PROBED, "step": STEP, "checkpoint": "/home/me/last.ckpt"}}
    reports = [tmp_path / "report.json", tmp_path / "probes.json"]
    for path, content in zip(reports, (generation, probe), strict=True):
        path.write_text(json.dumps(content))
    words = [word for path in reports for word in ("--metrics", str(path))]
    main(["export", str(file), str(tmp_path / "folder"), "--to", "diffusers", "--no-grid", *words])
    card = ModelCard.load(tmp_path / "folder" / "README.md")
    assert [result.metric_type for result in card.data.eval_results] == ["fid", "test_accuracy", "knn_accuracy"]
    assert "Note: 1,000 samples." in card.text
    assert "/home" not in card.content

    checkpoint = load(file)
    del probe["protocol"]["step"]
    for content, message in [
        ({**generation, "protocol": {**protocol, "samples": {**SAMPLES, "step": 4}}}, "of ema weights of step 4, not"),
        ({**generation, "protocol": {**protocol, "samples": {"name": "pictures"}}}, "does not say of which weights"),
        (probe, "does not say of which weights"),
        ({"protocol": {}}, "no report of evaluate.py"),
        ({"values": {}}, "protocol"),
        ([], "must be dict"),
    ]:
        reports[0].write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            of_report(reports[0], checkpoint)


def test_without_measurements(tmp_path):
    card = exported(small(tmp_path / "net.safetensors", num_classes=2), tmp_path / "folder")
    assert card.data.eval_results is None
    assert card.data.license == "unknown"
    assert "No measurement of these weights was given." in card.text
    assert "Not chosen yet: set it here" in card.text
    assert "| classes | 2: class 0, class 1 |" in card.text


def test_licence_of_imported_weights_is_their_publishers(tmp_path):
    net = UViT(32, 2, 3, dim=64, depth=2, heads=1, alpha_min=1.0)
    torch.save({name: value for name, value in net.state_dict().items() if name != "alphas"}, tmp_path / "nnet_ema.pth")
    import_official(tmp_path / "nnet_ema.pth", tmp_path / "net.safetensors", options=ImportOptions(heads=1))
    card = exported(tmp_path / "net.safetensors", tmp_path / "folder")
    assert "their licence is that of their publisher" in card.text
    assert "none, alpha is 1 in all 6 residual branches" in card.text


def test_names_from_files_leave_tables_whole(tmp_path):
    net = SiT(4, 2, 3, dim=16, depth=2, heads=2, num_classes=2, schedule="learnable", alpha_min=0.8)
    names = ("a|b", "x\n\n# heading <script>")
    file = write_denoiser(tmp_path / "net.safetensors", net, VP(), "eps", Sampling("euler", 2), names)
    text = model_card(load(file), "it's `mine`").text
    assert "| classes | 2: a\\|b, x # heading \\<script\\> |" in text
    assert "learned, initially from 1 to 0.8" in text
    assert cell("a\n b|c") == "a b\\|c"
    compile(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], "README.md", "exec")


def test_options_are_for_folders(tmp_path):
    for option in (["--license", "mit"], ["--metrics", "report.json"], ["--no-grid"]):
        with pytest.raises(UserError, match=f"{option[0]} is for folders of diffusers"):
            main(["export", str(BUNDLED), str(tmp_path / "out.safetensors"), *option])
    with pytest.raises(UserError, match="give its short name on the Hub"):
        main(["export", str(BUNDLED), str(tmp_path / "folder"), "--to", "diffusers", "--license", "My own!"])
    assert not os.listdir(tmp_path)
