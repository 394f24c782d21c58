"""The public names: which there are, and that `import uvit_decay` imports no more."""

import re
import subprocess
import sys
from importlib import import_module

import pytest
import yaml
from conftest import ROOT, print_config

import uvit_decay
from uvit_decay.data import ImageData, Latents
from uvit_decay.data.named import build_data
from uvit_decay.files.instantiate import FORMER, Spec, build

# To add or remove a name here is a decision about what users may rely on.
NAMES = {
    *("UViT", "SiT", "MAE", "ViT", "ResNet", "create_model", "load", "attach", "shortcuts", "effective_decay"),
    *("DiffusionTask", "MAETask", "ClassifyTask", "Samples", "generate"),
    *("EMA", "LinearProbes", "GenerationMetrics", "Preview"),
}
SUBPACKAGES = {path.parent.name for path in (ROOT / "uvit_decay").glob("*/__init__.py")}


def test_these_are_the_public_names():
    assert set(uvit_decay.__all__) == NAMES | SUBPACKAGES | {"__version__"}
    assert set(uvit_decay.__all__) <= set(dir(uvit_decay))
    with pytest.raises(AttributeError):
        uvit_decay.not_there  # noqa: B018


def test_the_package_imports_nothing_but_the_standard_library():
    program = "import sys; before = {*sys.modules}; import uvit_decay; print(*sorted({*sys.modules} - before))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    imported = {name.split(".")[0] for name in found.stdout.split()}
    assert "uvit_decay" in imported
    assert imported - {"uvit_decay"} <= sys.stdlib_module_names
    assert not [name for name in found.stdout.split() if name.startswith("uvit_decay.")]


@pytest.mark.parametrize("name", sorted(SUBPACKAGES))
def test_a_subpackage_lists_its_public_names(name):
    package = import_module(f"uvit_decay.{name}")
    assert len(set(package.__all__)) == len(package.__all__)
    for public in package.__all__:
        assert getattr(package, public).__class__.__name__ != "module"
    if hasattr(package, "MODULES"):  # imported when they are used: a module of the same name would hide one
        files = {path.stem for path in (ROOT / "uvit_decay" / name).iterdir()}
        assert not files & set(package.__all__)


def test_the_api_has_a_page_for_each_subpackage_with_public_names():
    listed = re.findall(r"^   uvit_decay\.(\w+)$", (ROOT / "docs" / "api" / "index.md").read_text(), re.MULTILINE)
    assert set(listed) == {package for package in SUBPACKAGES if import_module(f"uvit_decay.{package}").__all__}


@pytest.mark.parametrize("form", ["UViT", "uvit_decay.UViT", "uvit_decay.nn.UViT"])
def test_configurations_have_the_paths_that_they_always_had(form, tmp_path, monkeypatch, capsys):
    flags = [f"--model.net={form}", "--model.path=VP", "--trainer.callbacks+=EMA"]
    config = yaml.safe_load(print_config(monkeypatch, capsys, tmp_path, "fit", *flags))
    assert config["model"]["class_path"] == "uvit_decay.tasks.DiffusionTask"
    assert config["model"]["init_args"]["net"]["class_path"] == "uvit_decay.nn.UViT"
    assert config["model"]["init_args"]["path"]["class_path"] == "uvit_decay.diffusion.noise_path.VP"
    assert "uvit_decay.callbacks.EMA" in [each["class_path"] for each in config["trainer"]["callbacks"]]


def test_configurations_of_earlier_versions_name_classes_that_moved(tmp_path, monkeypatch, capsys):
    former = {"class_path": "uvit_decay.callbacks.summary.Summary"}
    (tmp_path / "former.yaml").write_text(yaml.dump({"trainer": {"callbacks": [former]}}))
    config = yaml.safe_load(print_config(monkeypatch, capsys, tmp_path, "fit", "--config=former.yaml"))
    assert "uvit_decay.callbacks.Summary" in [each["class_path"] for each in config["trainer"]["callbacks"]]
    for module, package in FORMER.items():
        assert import_module(package).__all__, module


def test_the_data_of_an_earlier_configuration_are_built():
    spec = Spec("uvit_decay.data.latents.module.Latents", {"path": "latents"})
    assert isinstance(build(spec, ImageData, "uvit_decay.data"), Latents)


def test_the_data_of_the_configuration_of_a_run_on_latents_are_built(tmp_path, monkeypatch, capsys):
    config = print_config(monkeypatch, capsys, tmp_path, "fit", "--data=Latents", "--data.path=latents")
    (tmp_path / "config.yaml").write_text(config)
    assert isinstance(build_data(str(tmp_path / "config.yaml")), Latents)


def test_an_argument_that_is_gone_is_left_out_of_earlier_configurations(tmp_path, monkeypatch, capsys):
    extractor = {"class_path": "uvit_decay.metrics.SmallClassifier", "init_args": {"steps": None}}
    metrics = {"class_path": "uvit_decay.callbacks.GenerationMetrics", "init_args": {"extractor": extractor}}
    (tmp_path / "former.yaml").write_text(yaml.dump({"trainer": {"callbacks": [metrics]}}))
    config = yaml.safe_load(print_config(monkeypatch, capsys, tmp_path, "fit", "--config=former.yaml"))
    found = [each for each in config["trainer"]["callbacks"] if each["class_path"] == metrics["class_path"]]
    assert found[0]["init_args"]["extractor"]["class_path"].endswith(".SmallClassifier")
