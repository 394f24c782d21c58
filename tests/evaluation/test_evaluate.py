"""evaluate.py as a user runs it, on digits: the same numbers from every form, on any number of processes."""

import json
import shutil

import numpy as np
import pytest
from evaluations import digit_images, evaluate, refused
from PIL import Image
from refusals import find_line

from uvit_decay.pictures import save_npz, save_pngs

DIGITS = ["--reference", "digits:train", "--features", "digits"]


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """150 noisy digits as a folder of PNGs, an array, and as JPEGs."""
    folder, images = tmp_path_factory.mktemp("forms"), digit_images(150, 30)
    (folder / "pngs").mkdir()
    (folder / "jpegs").mkdir()
    save_pngs(folder / "pngs", [images])
    for path in sorted((folder / "pngs").iterdir()):
        Image.open(path).save(folder / "jpegs" / f"{path.stem}.jpg", quality=95)
    save_npz(folder / "array.npz", [images], len(images))
    return folder


def values(folder, name="report.json"):
    return json.loads((folder / name).read_text())["values"]


def test_a_folder_and_an_array_give_the_same_numbers_and_a_report(forms, tmp_path, monkeypatch, capsys):
    results = []
    for form in ("pngs", "array.npz"):
        evaluate(monkeypatch, tmp_path, "generation", "--samples", forms / form, *DIGITS, "--kid-subset", 50,
                 "--out", "report.json")  # fmt: skip
        results.append(values(tmp_path))
    assert results[0] == results[1]
    assert set(results[0]) == {"fd", "is", "is_std", "kid", "kid_std", "precision", "recall", "classifier_accuracy"}
    report = json.loads((tmp_path / "report.json").read_text())
    assert [key for key in report["metrics"] if key.startswith("fd/")] == [
        "fd/array-150_vs_digits-train-1437_small-cnn-2"
    ]
    assert report["protocol"]["n"] == 150
    assert report["protocol"]["reference"] == {"name": "digits-train", "n": 1437, "size": "8x8"}
    assert any("below 10,000" in remark for remark in report["remarks"])
    assert not (tmp_path / "report.features").exists()
    html = (tmp_path / "report.html").read_text()
    assert "digits-train" in html
    assert "data:image/png" in html
    output = capsys.readouterr()
    assert "wrote report.json and report.html" in output.out
    assert "not comparable" in output.err


def test_jpegs_against_pngs_are_warned_about(forms, tmp_path, monkeypatch, capsys):
    evaluate(monkeypatch, tmp_path, "generation", "--samples", forms / "jpegs", "--reference", forms / "pngs",
             "--features", "digits", "--metrics", "fd", "--out", "report.json")  # fmt: skip
    printed = capsys.readouterr().err
    find_line(printed, "jpegs", "JPEGs")
    find_line(printed, forms / "pngs", "150 pictures", "8x8")
    assert values(tmp_path)["fd"] > 0


def test_a_picture_that_failed_is_replaced_and_the_same_command_runs(forms, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(forms / "jpegs", tmp_path / "my samples")
    broken = folder / "000149.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) - 20])
    command = ["generation", "--samples", folder, *DIGITS, "--metrics", "fd", "--out", "report.json"]
    find_line(refused(monkeypatch, tmp_path, capsys, *command), "1 of 150", broken.name)
    broken.write_bytes(whole)
    evaluate(monkeypatch, tmp_path, *command)
    assert values(tmp_path)["fd"] > 0


def test_statistics_stand_in_for_the_reference(forms, tmp_path, monkeypatch, capsys):
    evaluate(monkeypatch, tmp_path, "statistics", "digits:train", "--features", "digits", "--out", "stats.npz")
    assert "1,437 images of digits-train" in capsys.readouterr().out
    with np.load(tmp_path / "stats.npz") as arrays:
        assert (arrays["mu"].shape, arrays["sigma"].shape, arrays["sigma"].dtype) == ((64,), (64, 64), np.float64)
        about = json.loads(str(arrays["about"]))
    assert (about["name"], about["n"], about["extractor"][:11]) == ("digits-train", 1437, "small-cnn-2")
    base = ["generation", "--samples", forms / "array.npz", "--features", "digits"]
    evaluate(monkeypatch, tmp_path, *base, "--reference", "digits:train", "--out", "images.json")
    find_line(capsys.readouterr().err, "remark", "kid", "--kid-subset")
    find_line(json.loads((tmp_path / "images.json").read_text())["remarks"], "kid", "--kid-subset")
    evaluate(monkeypatch, tmp_path, *base, "--reference", "stats.npz", "--out", "stats.json")
    remarks = capsys.readouterr().err
    for name in ("kid", "prc"):
        find_line(remarks, "remark", name, "statistics")
    assert values(tmp_path, "images.json")["fd"] == pytest.approx(values(tmp_path, "stats.json")["fd"], rel=1e-12)
    np.savez(tmp_path / "few.npz", arr_0=np.load(forms / "array.npz")["arr_0"][:30])
    evaluate(monkeypatch, tmp_path, "statistics", "few.npz", "--features", "digits", "--out", "few_stats.npz")
    few = [*base, "--reference", "few_stats.npz"]
    find_line(refused(monkeypatch, tmp_path, capsys, *few), "30 images", 65)
    capsys.readouterr()
    evaluate(monkeypatch, tmp_path, *few, "--allow-few")
    find_line(capsys.readouterr().err, "30 reference images", "64 features")


def test_a_checkpoint_is_evaluated_as_it_samples(trained, tmp_path, monkeypatch):
    base = ["--ckpt", trained, "--steps", 3, "--seed", 4]
    evaluate(monkeypatch, tmp_path, "generation", *base, "--num", 120, *DIGITS, "--kid-subset", 50,
             "--save-samples", "samples.npz", "--out", "direct.json")  # fmt: skip
    evaluate(monkeypatch, tmp_path, "generation", "--samples", "samples.npz", *DIGITS, "--kid-subset", 50,
             "--out", "array.json")  # fmt: skip
    assert values(tmp_path, "direct.json") == values(tmp_path, "array.json")
    report = json.loads((tmp_path / "direct.json").read_text())
    (key,) = [key for key in report["metrics"] if key.startswith("fd/")]
    assert key == "fd/last-step12_ema_dpm++3_w2_seed4_nfe3-120_vs_digits-train-1437_small-cnn-2"
    assert report["protocol"]["measured_nfe"] == 6  # three steps, both halves of guidance
    assert set(report["coverage"]) == set("0123456789")
    assert np.load(tmp_path / "samples.npz")["arr_1"].tolist() == [i % 10 for i in range(120)]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_find_what_one_finds(programs, trained, tmp_path, monkeypatch, processes, exhaustive):
    if processes > 2 and not exhaustive:
        pytest.skip("a sample: --exhaustive tries three processes, too")
    options = ["--ckpt", str(trained), "--num", "97", "--steps", "3", "--metrics", "fd,is", *DIGITS]
    evaluate(monkeypatch, tmp_path, "generation", *options, "--out", "one.json")
    command = ["tests/shared/surroundings.py", "quick", "evaluate.py", "generation", *options, "--out", "many.json"]
    programs.run_ranks(processes, *command, cwd=tmp_path, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert values(tmp_path, "many.json") == pytest.approx(values(tmp_path, "one.json"), rel=1e-9)


TEST = ["--samples", "digits:test"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "nowhere", *DIGITS], "nowhere"),
        ([*TEST, "--reference", "digits:train"], "Inception"),
        (["--samples", "few.npz", *DIGITS], ("few", 40, "fd", 65, "--allow-few")),
        ([*TEST, *DIGITS, "--metrics", "sfid"], ("--metrics", "sfid", "spatial", "small-cnn")),
        ([*TEST, *DIGITS[2:], "--reference", "recorded.npz"], "inception-v3-adm"),
        ([*TEST, *DIGITS[2:], "--reference", "plain.npz", "--metrics", "kid"], ("kid", "statistics")),
        (DIGITS, ("--samples", "--ckpt")),
        ([*TEST, *DIGITS, "--guidance", "3"], ("--guidance", "--ckpt")),
        ([*TEST, *DIGITS[:2], "--features", "dinov2", "--protocol", "adm"], ("--protocol", "adm", "dinov2-edm2")),
        ([*TEST, *DIGITS[:2], "--protocol", "best"], ("--protocol", "dinov2-edm2, dinov2-dgm", "best")),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path / "hub"))
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    save_npz(tmp_path / "few.npz", [digit_images(40)], 40)
    np.savez(tmp_path / "plain.npz", mu=np.zeros(64), sigma=np.eye(64))
    about = np.array(json.dumps({"extractor": "inception-v3-adm-6726825d0123", "n": 9}))
    np.savez(tmp_path / "recorded.npz", mu=np.zeros(64), sigma=np.eye(64), about=about)
    line = refused(monkeypatch, tmp_path, capsys, "generation", *options, "--out", "report.json")
    find_line(line, message)
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["generation", *TEST, *DIGITS, "--out", "report.html"], ".json"),
        (["generation", "--ckpt", "c.ckpt", *DIGITS, "--save-samples", "s"], ".npz"),
        (
            ["statistics", "digits:test", "--features", "digits", "--out", "s.npz", "--spatial"],
            ("--spatial", "Inception"),
        ),
        (["statistics", "digits:test", "--features", "net.pt2", "--out", "s.npz"], "Extractor"),
    ],
)
def test_names_and_options_that_would_lose_something_are_refused(tmp_path, monkeypatch, capsys, options, message):
    find_line(refused(monkeypatch, tmp_path, capsys, *options), message)


def test_default_names_tell_what_was_measured_and_features_of_a_reference_are_kept(forms, tmp_path, monkeypatch):
    base = ["generation", "--samples", forms / "array.npz", *DIGITS, "--metrics"]
    for metrics, size in (("fd", 64), ("is", 50)):
        evaluate(monkeypatch, tmp_path, *base, metrics, "--batch-size", size)
    assert len(list((tmp_path / "cache" / "uvit_decay" / "features").glob("*/about.json"))) == 1
    names = [path.name for path in tmp_path.glob("*.json")]
    assert len(names) == 2
    assert all(name.startswith("array-150_vs_digits-train-1437_small-cnn-2_") for name in names)


def no_network(*args, **kwargs):
    raise OSError("no network")
