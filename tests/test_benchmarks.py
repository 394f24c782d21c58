"""`python -m benchmarks` and `benchmarks.scaling`: tables and JSON files, at sizes whose figures mean nothing."""

import csv
import json

import numpy as np
import pytest
import torch
from cifar_files import write_cifar
from conftest import ROOT
from PIL import Image
from refusals import find_line, raises_user_error

from uvit_decay.data import CIFAR10

FIELDS = {
    *("case", "precision", "compiled", "batch", "pairs", "seconds", "plain_seconds", "ratio", "flops", "mfu"),
    *("memory", "plain_memory", "difference", "tolerance"),
}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def test_table_and_json_have_a_ratio_for_every_comparison(tmp_path, capsys):
    from benchmarks.__main__ import main

    path = tmp_path / "folder" / "bench.json"
    main(["--quick", "--budget", "0", "--only", "training", "loading", "--json", str(path)])  # a round of each
    table = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert {"device", "versions", "threads", "date", "matrix_rate"} <= written["machine"].keys()
    assert {len(rows) for rows in written["groups"].values()} == {9, 3}
    for row in (row for rows in written["groups"].values() for row in rows):
        assert row.keys() == FIELDS
        low, median, high = row["ratio"].values()
        assert 0 < low <= median <= high
        shown = f"{row['precision']:18}", f"{median:.2f}", f"{low:.2f} .. {high:.2f}"
        assert any(all(part in line for part in (row["case"], *shown)) for line in table.splitlines())
        assert row["difference"] <= row["tolerance"]
        assert row["plain_seconds"]["low"] / row["seconds"]["high"] <= high
    steps = [row for row in written["groups"]["training"] if row["precision"] == "float32"]
    assert all(row["difference"] < 1e-5 and 0 < row["mfu"] < 1.5 for row in steps)


def test_quick_runs_of_additions_and_of_scaling_write_their_rows(tmp_path):
    from benchmarks import __main__, scaling

    path = tmp_path / "bench.json"
    __main__.main(["--quick", "--budget", "0", "--only", "additions", "--json", str(path)])
    rows = json.loads(path.read_text())["groups"]["additions"]
    assert len(rows) == 7
    for row in rows:
        assert row["ratio"]["median"] == pytest.approx(row["seconds"]["median"] / row["plain_seconds"]["median"])
    scaling.main(["--quick", "--only", "steps", "probes", "--json", str(path)])
    found = json.loads(path.read_text())
    assert [row["cells"] for row in found["probes"]] == [2, 4]
    assert all(row["ms"] > 0 and row["predicted ms"] > 0 for part in found.values() for row in part)


def test_a_ratio_of_different_results_is_refused():
    from benchmarks.cases import Agreement

    Agreement(1e-4, 1e-3).check("case")
    for wrong in (2e-3, float("nan")):
        with raises_user_error("case"):
            Agreement(wrong, 1e-3).check("case, float32")


def test_flops_of_a_step_are_those_of_its_matrix_products():
    from benchmarks.measuring import model_flops

    x = torch.empty(3, 5, device="meta")
    weight = torch.empty(5, 7, device="meta", requires_grad=True)
    assert model_flops(lambda: (x @ weight).sum().backward()) == 2 * (2 * 3 * 5 * 7)


def test_a_gpu_table_says_what_was_not_measured(monkeypatch):
    from benchmarks import gpu
    from benchmarks.cases import Setting

    setting = Setting(torch.device("cpu"), quick=True, budget=0.1)
    # A fixed rate: where bfloat16 is emulated, matrices are slower than the layers of a network.
    setting.__dict__["rates"] = {"bf16": 2e12}
    rows = [*gpu.speed(setting, 10)]
    assert [(row["network"], row["batch"]) for row in rows] == [(name, batch) for name in gpu.QUICK for batch in (2, 4)]
    assert all(0 < row["mfu"] < 1.5 and row["GiB"] > 0 for row in rows)
    assert [row["mfu"] for row in rows] == pytest.approx([row["TFLOP/s"] / 2 for row in rows])

    def full(*_):
        raise torch.OutOfMemoryError("of a GPU")

    assert {row["note"] for row in gpu.speed(setting, 0)} == {"no time left"}
    monkeypatch.setattr(gpu, "OurStep", full)
    assert {row["note"] for row in gpu.speed(setting, 10)} == {"out of memory"}


@pytest.mark.slow
def test_a_gpu_is_tried_in_one_command(tmp_path, capfd, exhaustive):
    if not exhaustive:
        pytest.skip("a minute: --exhaustive runs the whole command, the tests above its parts")
    from benchmarks.gpu import main

    main(["--device", "cpu", "--quick", "--out", str(tmp_path / "gpu")])
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written.keys() == {"machine", "Training steps in bf16", "A run that was killed and resumed"}
    (run,) = written["A run that was killed and resumed"]
    assert 0 < run["resumed at step"] < run["last step"] == 100
    assert run["last loss"] < run["first loss"]
    said = capfd.readouterr().out
    assert "0 errors" in said
    assert set((tmp_path / "gpu.md").read_text().splitlines()) <= set(said.splitlines())


def test_figures_are_drawn_from_the_tables_of_the_results(tmp_path, monkeypatch):
    from benchmarks.studies import page_figures

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["page_figures", "--out", str(tmp_path)])
    page_figures.main()
    drawn = {path.name: Image.open(path) for path in tmp_path.iterdir()}
    assert {name: image.size for name, image in drawn.items()} == {
        name: Image.open(ROOT / "docs" / name).size
        for name in ("mae_rate.png", "resnet_depth.png", "digits_compare.png")
    }
    assert all(image.getpixel((0, 0))[3] == 0 for image in drawn.values())  # a transparent background


def test_gains_and_interactions_of_arms_are_paired_by_seed(tmp_path, capsys, monkeypatch):
    from benchmarks.studies import arm_tables, target

    monkeypatch.chdir(ROOT)
    # Arm -> accuracies of the seeds, in percent. Under velocity the decay gains 3 and 5 points, under x 1 point.
    arms = {"v_skips": [40, 41], "v_skips_decay": [43, 46], "x_skips": [42, 42, 50], "x_skips_decay": [43, 43, 51]}
    for arm, accuracies in arms.items():
        for seed, accuracy in enumerate(accuracies):
            about = [arm, seed, 2000, "c0ffee", "CPU"]
            blocks = [0.0] * 6 + [accuracy / 100] * 4 + [0.0] * 2
            shares = [0.0] * 6 + [0.01 * seed] * 4 + [0.0] * 2
            rows = [[*about, 0.2, "0.1", 0.0, *blocks], [*about, 0.2, "0.3", 0.0, *[0.0] * 12]]
            arm_tables.append(tmp_path, arm_tables.ACCURACY, rows)
            arm_tables.append(tmp_path, arm_tables.NOISE_SHARE, [[*about, "0.3", 0.0, *shares]])
            arm_tables.append(tmp_path, arm_tables.SAMPLES, [[*about, 5.25, 0.75]])
    target.main(["--tables", str(tmp_path), "--out", str(tmp_path / "target.png")])
    out = capsys.readouterr().out
    find_line(
        out,
        "| `v_skips` | 40.0, 41.0, - | 0.0, 1.0, - | 0.2000, 0.2000, - | 5.2, 5.2, - | 0.750, 0.750, - |",
    )
    find_line(out, "| decay, with skips | +4.0 +- 1.0 (2 seeds) | +1.0 +- 0.0 (3 seeds) | +3.0 +- 1.0 (2 seeds) |")
    find_line(out, "| 2e-3 | +4.0 +- 1.0 (2 seeds) |")
    find_line(out, "| skips | - | - | - |")
    assert Image.open(tmp_path / "target.png").width > 800


def test_a_finished_arm_is_added_to_the_three_tables(tmp_path, monkeypatch):
    from benchmarks.studies import arm_tables, target

    monkeypatch.chdir(ROOT)
    run = tmp_path / "v_skips_s1" / "version_0"
    (run / "probes_2000").mkdir(parents=True)
    (run / "metrics.csv").write_text("step,train/loss\n1649,9\n1749,0.3\n1999,0.1\n")
    layers = ["embeddings", *arm_tables.BLOCKS]
    with (run / "probes_2000" / "probes.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["t", "layer", "test_accuracy", "noise_share"])
        for time in (0.1, 0.3):
            for i, layer in enumerate(layers):
                writer.writerow([time, layer, 0.01 * i, time + 0.001 * i])
    (run / "samples_2000.json").write_text('{"values": {"fd": 12.5, "label_consistency": 0.75}}')
    words = ["--tables", str(tmp_path), "--arm", "v_skips", "--seed", "1", "--steps", "2000"]
    target.main(["--add", str(run), *words])
    assert arm_tables.read_statistics(tmp_path, arm_tables.ACCURACY, 2000) == {"v_skips": {"1": pytest.approx(8.5)}}
    assert arm_tables.read_statistics(tmp_path, arm_tables.NOISE_SHARE, 2000) == {
        "v_skips": {"1": pytest.approx(30.85)}
    }
    assert arm_tables.read_column(tmp_path, arm_tables.ACCURACY, "loss", 2000) == {"v_skips": {"1": pytest.approx(0.2)}}
    assert arm_tables.read_column(tmp_path, arm_tables.SAMPLES, "fd", 2000) == {"v_skips": {"1": 12.5}}


def add_arm(tables, arm, seed, cpu, accuracy, fd):
    """Add the rows of an arm to the three tables; all blocks have the same accuracy, in percent."""
    from benchmarks.studies import arm_tables

    about = [arm, seed, 2000, "c0ffee", cpu]
    blocks = [accuracy / 100] * 13
    arm_tables.append(tables, arm_tables.ACCURACY, [[*about, 0.2, "0.1", *blocks]])
    arm_tables.append(tables, arm_tables.NOISE_SHARE, [[*about, "0.3", *blocks]])
    arm_tables.append(tables, arm_tables.SAMPLES, [[*about, fd, 0.5]])


def test_arms_of_fresh_seeds_are_paired_by_seed_and_cpu(tmp_path, capsys, monkeypatch):
    from benchmarks.studies import target

    monkeypatch.chdir(ROOT)
    fresh = tmp_path / target.FRESH
    fresh.mkdir()
    for rate, gain in (("", 2), ("_4e-3", 1)):
        for seed in (3, 4):
            add_arm(fresh, f"v_skips{rate}", seed, "A", 40 + seed, 10.0)
            add_arm(fresh, f"v_skips_decay{rate}", seed, "A", 40 + seed + gain, 9.0)
            add_arm(fresh, f"v_skips_stream{rate}", seed, "A", 40 + seed + gain - 0.5, 9.5 - seed)
    add_arm(fresh, "v_skips", 5, "A", 60, 10.0)  # has no partner on this CPU
    add_arm(fresh, "v_skips_decay", 5, "B", 20, 10.0)
    add_arm(fresh, "v_skips_four", 3, "A", 41.5, 12.5)
    figure = tmp_path / "rates.png"
    target.main(["--tables", str(tmp_path), "--rates-out", str(figure)])
    lines = capsys.readouterr().out.splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("| at 2e-3 |")]
    decayed, _, scaled = lines[first + 2 : first + 5]
    assert decayed.startswith(
        "| 0.8 against 1.0 | +2.0 +- 0.0 (2 seeds) | +2.0 +- 0.0 (2 seeds) | -1.00 +- 0.00 (2 seeds) |"
    )
    assert scaled.startswith("| 1.0, skips of 0.8 against 0.8 | -0.5 +- 0.0 (2 seeds) |")
    assert "| -3.00 +- 0.50 (2 seeds) |" in scaled
    assert "| 2e-3 | 43.5 | 45.5 | 45.0 | 3, 4 |" in lines
    assert "| best rate | 2e-3 | 2e-3 | 2e-3 | |" in lines
    assert any(line.startswith("| 1.0, skips four times against 0.8 | -3.5 (1 seed)") for line in lines)
    assert not any("controls" in line for line in lines)
    assert Image.open(figure).width > 600


@pytest.mark.parametrize("name", ["SkipStart", "SkipWithoutBias"])
def test_controls_leave_out_one_part_of_the_scale_of_the_skips(name):
    from benchmarks.studies import skip_controls
    from uvit_decay.nn import SiT

    sizes = {
        "image_size": 8,
        "patch_size": 2,
        "channels": 3,
        "dim": 32,
        "depth": 4,
        "heads": 2,
        "num_classes": 3,
        "wiring": "decayed",
    }
    scaled = {**sizes, "alpha_min": 1.0, "skip_scale": "stream:0.8"}
    networks = []
    for make in (getattr(skip_controls, name), SiT):
        torch.manual_seed(0)
        networks.append(make(**scaled))
    control, stream = networks
    batch = (torch.randn(2, 3, 8, 8), torch.rand(2), torch.zeros(2, dtype=torch.long))
    for net in networks:
        torch.nn.init.ones_(net.final_layer.linear.weight)
    outputs = [net(*batch) for net in networks]
    torch.testing.assert_close(*outputs)  # biases start at 0
    for net in networks:
        for block in net.dec_blocks:
            torch.nn.init.ones_(block.skip.bias)
    outputs = [net(*batch) for net in networks]
    assert not torch.allclose(*outputs)  # neither scales the bias
    factors = stream.long_skips.scales[0]
    starts = [block.skip.weight for block in control.dec_blocks]
    plain = [block.skip.weight for block in stream.dec_blocks]
    for c, start, weight in zip(factors, starts, plain, strict=True):
        expected = c * weight if name == "SkipStart" else weight
        torch.testing.assert_close(start, expected)


def test_cifar10_is_written_as_the_class_folders_that_studies_read(tmp_path, monkeypatch):
    from benchmarks.studies.cifar10_folders import main

    (tmp_path / "data").mkdir()
    write_cifar(CIFAR10, tmp_path / "data", monkeypatch)
    main(["--data", str(tmp_path / "data"), "--out", str(tmp_path)])
    official = CIFAR10(tmp_path / "data", batch_size=1)
    official.setup()
    for split, images in (("train", official.train), ("test", official.test)):
        files = sorted((tmp_path / f"cifar10-{split}").rglob("*.png"), key=lambda path: path.name)
        assert [path.stem for path in files] == [f"{number:05d}" for number in range(len(images))]
        pixels, labels = images[list(range(len(images)))]
        assert [path.parent.name for path in files] == [official.class_names[label] for label in labels]
        read = np.stack([np.asarray(Image.open(path)) for path in files])
        assert np.array_equal(read, pixels.permute(0, 2, 3, 1).numpy())


PROGRAM = """
import json, pathlib, sys
import numpy as np
from PIL import Image
from safetensors.numpy import save_file
value = {value}
out = pathlib.Path(sys.argv[1])
save_file({{"w": np.array([1.0, value])}}, out / "w.safetensors")
np.savez(out / "a.npz", a=np.array([value, 2.0]))
Image.new("L", (2, 30), int(value)).save(out / "p.png")
(out / "t.csv").write_text(f"loss,seconds\\n{{value}},{{value}}")
(out / "t.jsonl").write_text(json.dumps({{"fd": value, "nan": float("nan"), "host": value}}))
"""


@pytest.mark.slow
def test_same_numbers_names_the_values_of_two_checkouts_that_differ(tmp_path, capsys):
    from benchmarks.same_numbers.__main__ import compare_checkouts
    from benchmarks.same_numbers.rows import Row

    for name, value in (("old", 3.0), ("same", 3.0), ("other", 4.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(PROGRAM.format(value=value))
    row = Row("row", "{checkout}/program.py {out}", ("w.safetensors", "a.npz", "p.png", "t.csv", "t.jsonl"))
    assert compare_checkouts([row], tmp_path / "old", tmp_path / "same", tmp_path / "out") == 0
    capsys.readouterr()
    assert compare_checkouts([row], tmp_path / "old", tmp_path / "other", tmp_path / "out") == 1
    lines = capsys.readouterr().out.splitlines()[-5:]
    named = ("w.safetensors: w", "a.npz: a", "p.png: pixels", "t.csv: [0].loss", "t.jsonl: [0].fd")
    assert all(any(name in line for line in lines) for name in named)  # and nothing else
    (tmp_path / "other" / "program.py").write_text("raise SystemExit('no such flag')")
    assert compare_checkouts([row], tmp_path / "old", tmp_path / "other", tmp_path / "out") == 1
    assert "no such flag" in capsys.readouterr().out


@pytest.mark.slow
def test_same_numbers_runs_a_command_in_two_checkouts(tmp_path, capsys):
    from benchmarks.same_numbers.__main__ import main

    assert main([str(ROOT), str(ROOT), "--only", "sample the bundled CIFAR-10 network", "--out", str(tmp_path)]) == 0
    assert "12292 values  same" in capsys.readouterr().out


@pytest.mark.slow
def test_same_speed_compares_the_steps_of_two_checkouts(capsys):
    from benchmarks.same_speed import main

    main([str(ROOT), str(ROOT), "--quick", "--pairs", "2", "--batch", "1", "--networks", "sit-s/2"])
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines] == [["sit-s/2", "linear", name, "2"] for name in ("float32", "bf16")]
    for line in lines:
        ratio, low, _, high = line.split()[6:10]
        assert 0 < float(low) <= float(ratio) <= float(high)


def test_shortcut_cost_has_the_ratios_and_parameters_of_each_kind(capsys):
    from benchmarks.shortcut_cost import main

    main(["--width", "8", "--rounds", "1", "--kinds", "linear", "learnable", "attnres"])
    *_, linear, learnable, attnres = capsys.readouterr().out.splitlines()
    assert linear.split("|")[1].strip() == "`linear`"
    assert [line.split("|")[4].strip() for line in (linear, learnable, attnres)] == ["+0", "+26", "+416"]
