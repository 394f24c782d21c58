"""Folders for diffusers through the Hub: pushed, and loaded by the name of the repository."""

import pytest
from diffusers import DiffusionPipeline
from hub_folders import BUNDLED, export, own_modules, sampled, seeded, stacked  # noqa: F401
from hub_server import hub  # noqa: F401
from huggingface_hub import hf_api

from uvit_decay.hub.push import push


@pytest.mark.parametrize("alone", [False, True])
def test_a_folder_comes_back_as_the_same_pipeline(hub, tmp_path, monkeypatch, alone):  # noqa: F811
    push(export(BUNDLED, tmp_path / "digits", alone=alone), "me/digits")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)  # of the functions that diffusers calls
    pipeline = DiffusionPipeline.from_pretrained("me/digits", trust_remote_code=True, cache_dir=tmp_path / "cache")
    assert type(pipeline).__module__.startswith("diffusers_modules" if alone else "uvit_decay")
    pictures = stacked(pipeline(class_labels=[0, 1, 2], generator=seeded(0)).images)
    assert (pictures == sampled(BUNDLED, range(3), seed=0)).all()
