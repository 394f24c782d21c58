"""Folders that work without this package."""

import ast
import builtins
import dis
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import einops
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils.dynamic_modules_utils import check_imports
from hub_folders import BUNDLED, export, own_modules, sampled, seeded, stacked, write_denoiser, write_latent_sit  # noqa: F401

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.__main__ import main
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.hub import source_files, stand_ins, standalone
from uvit_decay.hub.code import CodeFile
from uvit_decay.hub.denoiser import SiTDenoiser, UViTDenoiser
from uvit_decay.hub.folder import pipeline_of
from uvit_decay.hub.pipeline import DecayPipeline
from uvit_decay.hub.source_files import Name
from uvit_decay.nn import UViT

FILES = {kind.__name__: standalone.standalone(kind) for kind in (UViTDenoiser, SiTDenoiser, DecayPipeline)}
PACKAGES = {"PIL", "diffusers", "numpy", "torch"}  # diffusers itself needs the others
# Another process, in which this package and what else it needs beside torch and diffusers are not there.
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *more):
        return None if name.split(".")[0] in ABSENT else self.finder.find_spec(name, *more)
    def __getattr__(self, name):
        return getattr(self.finder, name)

ABSENT = "uvit_decay einops jaxtyping torchdiffeq lightning torchmetrics accelerate timm jsonargparse".split()
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils

torch.set_num_threads(1)
dynamic_modules_utils.HF_MODULES_CACHE, *folders = sys.argv[1:]
pipelines = [DiffusionPipeline.from_pretrained(folder, trust_remote_code=True) for folder in folders]
for folder, pipeline in zip(folders, pipelines):
    pipeline.save_pretrained(folder + "/again")
    again = DiffusionPipeline.from_pretrained(folder + "/again", trust_remote_code=True)
    for name, each in (("first", pipeline), ("second", again)):
        pictures = each(class_labels=[0, 1, 0], generator=torch.Generator().manual_seed(5)).images
        np.save(f"{folder}/{name}.npy", np.stack([np.asarray(picture) for picture in pictures]))
assert not [name for name in sys.modules if name.split(".")[0] in ABSENT]
"""


def test_pictures_without_this_package_are_those_of_sample(vae, tmp_path):
    files = {"digits": BUNDLED, "latents": write_latent_sit(tmp_path / "sit.safetensors", vae)}
    for name, file in files.items():
        main(["export", str(file), str(tmp_path / name), "--to", "diffusers", "--standalone", "--no-grid"])
    folders = [tmp_path / name for name in ("modules", *files)]
    subprocess.run([sys.executable, "-I", "-c", WITHOUT, *folders], check=True, cwd=tmp_path)
    for name, file in files.items():
        expected = sampled(file, range(3), classes=("0", "1"), labels="balanced", seed=5).squeeze()
        for time in ("first", "second"):
            assert (np.load(tmp_path / name / f"{time}.npy") == expected).all()


def test_every_sampler_makes_the_same_pictures(tmp_path):
    names = ("a", "b", "c")
    net = UViT(4, 2, 1, dim=8, depth=2, heads=2, num_classes=3, alpha_min=0.6)
    file = write_denoiser(tmp_path / "net.safetensors", net, VP(), "eps", Sampling("dpm++", 2, 1.5), names)
    export(file, tmp_path / "folder", alone=True)
    alone = DiffusionPipeline.from_pretrained(tmp_path / "folder", trust_remote_code=True)
    assert type(alone).__module__.startswith("diffusers_modules")
    ours = pipeline_of(load(file))
    for name, sampler in SAMPLERS.items():
        if not sampler.learned_variance:
            call = {"class_labels": [2], "sampler": name, "num_inference_steps": 3}
            pictures = [stacked(each(**call, generator=seeded(4)).images) for each in (alone, ours)]
            assert (pictures[0] == pictures[1]).all(), name


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_a_file_defines_each_name_once_and_all_that_it_uses(file):
    tree = ast.parse(file.text)
    names = [name for node in tree.body for name in (*source_files.names_of(node), *dict(source_files.imports(node)))]
    assert len(set(names)) == len(names)
    assert not set(names) & set(dir(builtins))

    def used(code: types.CodeType) -> Iterator[str]:
        yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                yield from used(part)

    assert not set(used(compile(tree, "file", "exec"))) - {*names, *dir(builtins)}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_a_file_imports_no_other_package(file, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("importlib.import_module", asked.append)
    (tmp_path / "file.py").write_text(file.text)
    assert check_imports(tmp_path / "file.py") == []  # diffusers' own check
    assert {name for name in asked if name not in sys.stdlib_module_names} <= PACKAGES


def test_a_file_is_named_by_its_contents(monkeypatch):
    assert standalone.standalone(DecayPipeline) == FILES["DecayPipeline"]
    assert isinstance(FILES["DecayPipeline"], CodeFile)
    monkeypatch.setattr(standalone, "ABOUT", standalone.ABOUT.replace("Made of", "Made from"))
    other = standalone.standalone(DecayPipeline)
    assert other.name.rpartition("_")[0] == FILES["DecayPipeline"].name.rpartition("_")[0]
    assert other.name != FILES["DecayPipeline"].name


def test_rearrangements_are_those_of_einops():
    nn = Path(source_files.path_of("uvit_decay.nn")).parent
    calls = [
        node
        for path in nn.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "rearrange"
    ]
    assert len(calls) >= 7
    for call in calls:
        pattern = call.args[1].value
        before = pattern.split("->")[0]
        axes = {name: 2 + place for place, name in enumerate(before.replace("(", " ").replace(")", " ").split())}
        axes |= {"1": 1, "three": 3}
        groups = [part.split() for part in before.replace("(", "|(").replace(")", ")|").split("|")]
        shape = []
        for group in groups:
            merged = group and group[0].startswith("(")
            sizes = [axes[name.strip("()")] for name in group]
            shape += [int(np.prod(sizes))] if merged else sizes
        x = torch.arange(int(np.prod(shape))).reshape(shape)
        given = {keyword.arg: axes[keyword.arg] for keyword in call.keywords}
        assert torch.equal(stand_ins.rearrange(x, pattern, **given), einops.rearrange(x, pattern, **given)), pattern


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (Name("uvit_decay.runtime.errors", "user_errors"), "within a function"),
        (Name("uvit_decay.hub.denoiser", "Nothing"), "Nothing"),
    ],
)
def test_what_cannot_be_put_together_is_an_error(name, problem):
    with pytest.raises((ValueError, KeyError), match=problem):
        standalone.Bundle(name).text()
