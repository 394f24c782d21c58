"""Folders through the Hub: loaded by the name of the repository."""

from diffusers import DiffusionPipeline
from hub_folders import BUNDLED, export, own_modules, sampled, seeded, stacked  # noqa: F401
from hub_server import hub  # noqa: F401
from huggingface_hub import hf_api


def test_a_folder_comes_back_as_the_same_pipeline(hub, tmp_path, monkeypatch):  # noqa: F811
    hub.add("me/digits", export(BUNDLED, tmp_path / "digits"))
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)  # of the functions that diffusers calls
    pipeline = DiffusionPipeline.from_pretrained("me/digits", trust_remote_code=True, cache_dir=tmp_path / "cache")
    assert type(pipeline).__module__.startswith("diffusers_modules")
    pictures = stacked(pipeline(class_labels=[0, 1, 2], generator=seeded(0)).images)
    assert (pictures == sampled(BUNDLED, range(3), seed=0)).all()
