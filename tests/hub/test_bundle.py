"""Folders that work without this package."""

import ast
import builtins
import dis
import subprocess
import sys
import types
from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import pytest
from diffusers.utils.dynamic_modules_utils import check_imports
from hub_folders import (
    BUNDLED,
    own_modules,  # noqa: F401
    sample_pixels,
    write_latent_sit,
)

from uvit_decay.commands.convert import main
from uvit_decay.hub.bundle import bundle
from uvit_decay.hub.denoiser import SiTDenoiser, UViTDenoiser
from uvit_decay.hub.pipeline import DecayPipeline, code_of

FILES = {kind.__name__: bundle(kind) for kind in (UViTDenoiser, SiTDenoiser)} | {"pipeline": code_of(DecayPipeline)}
NOT_CALLED = {"report"}  # in a function of the commands
PACKAGES = {"PIL", "diffusers", "filelock", "huggingface_hub", "numpy", "safetensors", "torch", "yaml"}  # of diffusers
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

ABSENT = "uvit_decay beartype einops jaxtyping torchdiffeq lightning torchmetrics accelerate timm jsonargparse".split()
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import dynamic_modules_utils

torch.set_num_threads(1)
dynamic_modules_utils.HF_MODULES_CACHE, *folders = sys.argv[1:]
pipelines = {folder: DiffusionPipeline.from_pretrained(folder, trust_remote_code=True) for folder in folders}
again = folders[-1] + "/again"
pipelines[folders[-1]].save_pretrained(again)
pipelines[again] = DiffusionPipeline.from_pretrained(again, trust_remote_code=True)
for folder, pipeline in pipelines.items():
    pictures = pipeline(class_labels=[0, 1, 0], generator=torch.Generator().manual_seed(5)).images
    np.save(f"{folder}/pictures.npy", np.stack([np.asarray(picture) for picture in pictures]))
assert not [name for name in sys.modules if name.split(".")[0] in ABSENT]
"""


def test_pictures_without_this_package_are_those_of_sample(vae, tmp_path):
    files = {"digits": BUNDLED, "latents": write_latent_sit(tmp_path / "sit.safetensors", vae)}
    for name, file in files.items():
        main(["export", str(file), str(tmp_path / name), "--to", "diffusers"])
    folders = [tmp_path / name for name in ("modules", *files)]
    subprocess.run([sys.executable, "-I", "-c", WITHOUT, *folders], check=True, cwd=tmp_path)
    for name, file in {**files, "latents/again": files["latents"]}.items():
        expected = sample_pixels(file, range(3), classes=("0", "1"), labels="balanced", seed=5).squeeze()
        assert (np.load(tmp_path / name / "pictures.npy") == expected).all()


def meanings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a file gives, and to what."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = node.module if isinstance(node, ast.ImportFrom) else ""
            yield from ((alias.asname or alias.name.split(".")[0], f"{origin} {alias.name}") for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            yield from ((part.id, ast.unparse(node)) for part in parts if part.id != "__all__")


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_a_name_has_one_meaning_and_all_that_are_used_have_one(file):
    tree, names = ast.parse(file.text), {}
    for name, meaning in meanings(tree):
        assert names.setdefault(name, meaning) == meaning, f"two modules of one file give a meaning to {name}"
    assert not set(names) & set(dir(builtins))

    def used(code: types.CodeType) -> Iterator[str]:
        yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                yield from used(part)

    assert not set(used(compile(tree, "file", "exec"))) - {*names, *dir(builtins), "__name__"} - NOT_CALLED


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_a_file_imports_no_other_package(file, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("importlib.import_module", asked.append)
    (tmp_path / "file.py").write_text(file.text)
    assert check_imports(tmp_path / "file.py") == []  # diffusers' own check
    assert {name for name in asked if name not in sys.stdlib_module_names} <= PACKAGES
    assert file.name.endswith(sha256(file.text.encode()).hexdigest()[:8])  # diffusers copies all files into one folder
