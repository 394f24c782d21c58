"""Run folders to compare, and the command that compares them."""

import evaluations
import yaml
from evaluations import evaluate

from uvit_decay.compare.runs import BEST, EFFECTIVE_RANK, ENTROPY, KNN, MEAN_SHARE, NOISE_SHARE, ON_TEST
from uvit_decay.runs.history import GENERATION, PROBES, Measurement, append

EVALUATIONS = {60: (0.5, 1.0), 120: (0.6, 3.0), 180: (0.8, 4.0)}  # step: (accuracy, entropy of the spectrum)
METADATA = {
    "n": 1000,
    "samples": {"name": "samples", "weights": "ema", "sampler": "dpm++", "steps": 12, "guidance": 2.0},
    "reference": {"name": "digits-train"},
    "extractor": "small-cnn",
}


def configuration(alpha_min=0.7, seed=0, probes=True, batch_size=32, ckpt_path=None, dim=64):
    """Return a short form of the configuration that train.py saves."""
    net = {"class_path": "uvit_decay.nn.UViT", "init_args": {"alpha_min": alpha_min, "schedule": "linear", "dim": dim}}
    callbacks = [{"class_path": "uvit_decay.callbacks.EMA", "init_args": {"decay": 0.995}}]
    if probes:
        callbacks.append({"class_path": "uvit_decay.callbacks.LinearProbes", "init_args": {"times": [0.1, 0.2]}})
    return {
        "seed_everything": seed,
        "trainer": {"accumulate_grad_batches": 1, "callbacks": callbacks, "logger": {"init_args": {"version": None}}},
        "model": {"init_args": {"net": net, "optim": {"lr": 0.003, "schedule": "cosine"}}},
        "data": {"class_path": "uvit_decay.data.Digits", "init_args": {"batch_size": batch_size}},
        "ckpt_path": ckpt_path,
    }


def a_run(
    folder,
    version=0,
    evaluations=EVALUATIONS,
    fid=12.0,
    metadata=METADATA,
    at=180,
    earlier=1,
    effective_rank=False,
    top1=None,
    mean_share=None,
    noise_share=None,
    pool="mean",
    **options,
):
    """Write a run folder as train.py does, with measurements of the samples at the steps `earlier` and `at`."""
    run = folder / "digits" / f"version_{version}"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("# lightning.pytorch==2.6\n" + yaml.safe_dump(configuration(**options)))
    for step, (accuracy, entropy) in evaluations.items():
        values = {BEST: accuracy, ON_TEST: accuracy + 0.01, "tracked_accuracy": accuracy / 2, KNN: accuracy / 4}
        values |= {ENTROPY: entropy, EFFECTIVE_RANK: 10 - entropy} if effective_rank else {ENTROPY: entropy}
        values |= {MEAN_SHARE: mean_share} if mean_share else {}
        values |= {NOISE_SHARE: noise_share} if noise_share else {}
        append(run / PROBES, measurement(step, values, {"pool": pool}))
    if metadata is not None:
        append(run / GENERATION, measurement(earlier, {"fd": 99.0, "is": 1.0}, metadata))
        append(run / GENERATION, measurement(at, {"fd": fid, "is": 2.0}, metadata))
    if top1 is not None:
        lines = ["val/top1,step,train/loss", ",10,2.5", "0.1,20,", f"{top1},180,", "0."]  # killed while it wrote
        (run / "metrics.csv").write_text("\n".join(lines))
    return run


def measurement(step, values, metadata):
    return Measurement(step, step / 44, 32 * step, values, metadata)


def shift_evaluations(by):
    return {step: (accuracy + by, rank + by) for step, (accuracy, rank) in EVALUATIONS.items()}


def compare(monkeypatch, folder, *args):
    """Run `python evaluate.py compare ...` in this process, in `folder`."""
    evaluate(monkeypatch, folder, "compare", *args)


def refused(monkeypatch, capsys, folder, *args):
    """Return the line with which compare refuses its input."""
    return evaluations.refused(monkeypatch, folder, capsys, "compare", *args)
