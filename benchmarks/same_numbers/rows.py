"""The commands that both checkouts run, and the files of each that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CLASSES, PICTURES = 3, 40  # pictures of each class
RESUMED = "resumed"  # folder of the runs that NEW resumes
COMPILED = 1e-6  # relative tolerance of compiled networks: compilers may order sums differently
STEPS, STORED = 20, 10  # steps of each training; the step whose checkpoint is kept
KEPT = f"step_{STORED:08d}.ckpt"
CALLBACKS = {
    "EMA": {"decay": 0.9},
    "Preview": {"every_n_steps": STORED, "rows": 3, "columns": 3},
    "GenerationMetrics": {
        "extractor": {"class_path": "uvit_decay.metrics.SmallClassifier"},
        "num": 80,
        "max_reference": 100,
        "every_n_steps": STORED,
    },
    "Reconstructions": {"every_n_steps": STORED, "num": 4},
    "LinearProbes": {"every_n_steps": STORED, "max_train": 60, "max_test": 40},
    "LastCheckpoint": {"every_n_steps": STORED, "keep_every_n_steps": STORED},
}
DIFFUSION = ("EMA", "Preview", "GenerationMetrics", "LinearProbes", "LastCheckpoint")


@dataclass(frozen=True)
class Row:
    """A command that both checkouts run, and the files that are compared afterwards.

    command: words after `python`; {out} is the folder of this side, where it runs, {old} the folder of OLD, {checkout}
        the checkout, {here} the folder of this module.
    files: patterns of the files that are compared, below {out}.
    callbacks: callbacks of a training, given by a configuration of its own, {out}/NAME.yaml.
    old, new: more words for one side, where flags differ between the checkouts.
    renamed: files that have another name in NEW: name in OLD -> name in NEW.
    resumed: trainings of OLD whose copies NEW resumes from their stored step; OLD does not run the command.
    apart: whether the table has a line for each pattern of `files`.
    tolerance: largest difference of two numbers, relative to the largest number of their tensor.
    """

    name: str
    command: str
    files: tuple[str, ...]
    callbacks: tuple[str, ...] = ()
    old: str = ""
    new: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    resumed: tuple[str, ...] = ()
    apart: bool = False
    tolerance: float = 0.0


def train(name: str, config: str, callbacks: Sequence[str], flags: str, results: Sequence[str], **options: str) -> Row:
    """Return the row of a training run, whose folder is {out}/runs/NAME/version_0."""
    given = f"--config {{checkout}}/configs/{config}.yaml --config {{out}}/{name}.yaml"
    files = ("checkpoints/last.ckpt", f"checkpoints/{KEPT}", "metrics.csv", *results)
    patterns = tuple(f"runs/{name}/version_0/{file}" for file in files)
    return Row(name, f"{{checkout}}/train.py fit {given} {flags}", patterns, tuple(callbacks), **options)


SAMPLED = ("samples/*.png", "generation.jsonl", "probes.jsonl")
TINY = "--model.net.dim 32 --model.net.depth 4 --model.net.heads 2"
FOLDER = "--data.path {out}/pictures --data.image_size 32 --data.batch_size 16"
LAST = "{old}/runs/%s/version_0/checkpoints/last.ckpt"
DIGITS, SIT, MAE = LAST % "digits", LAST % "sit", LAST % "mae"
FEW = "--max-train 60 --max-test 40"
KINDS = "-P {here}/kinds.py"
LEARNED = ("learnable", "rezero", "layerscale", "dar-t")
TRAIN_LEARNED = f"{KINDS} train {{checkout}} {{out}}/learned.yaml {','.join(LEARNED)}"
LEARNED_FILES = tuple(f"runs/{kind}/version_0/checkpoints/last.ckpt" for kind in LEARNED)
NETWORKS = ("uvit", "sit", "dit", "mae", "vit", "resnet")

ROWS = (
    train("digits", "digits", DIFFUSION, "--model.sampling.steps 4", SAMPLED),
    train("sit", "digits_sit", DIFFUSION, "--model.sampling.steps 4", SAMPLED),
    train(
        "uvit",
        "cifar100_uvit_s_cond",
        ("EMA", "Preview", "LastCheckpoint"),
        f"{TINY} --model.net.num_classes {CLASSES} --data Images {FOLDER} --data.flip true --trainer.devices 1"
        " --trainer.accelerator cpu --trainer.check_val_every_n_epoch null --model.sampling.sampler dpm++"
        " --model.sampling.steps 4",
        ("samples/*.png",),
    ),
    train(
        "mae",
        "mae_cifar10",
        ("EMA", "Reconstructions", "LinearProbes", "LastCheckpoint"),
        f"{TINY} --model.net.decoder_depth 2 --data.holdout 0.2 --trainer.val_check_interval {STORED} {FOLDER}",
        ("reconstructions/*.png", "probes.jsonl"),
    ),
    train(
        "resnet",
        "resnet_cifar10",
        ("LastCheckpoint",),
        f"--model.net.width 8 --model.net.depth 8 --model.net.num_classes {CLASSES} {FOLDER}",
        (),
    ),
    Row(
        "resume",
        "{checkout}/train.py fit --config {checkout}/configs/digits.yaml --config {out}/digits.yaml"
        f" --model.sampling.steps 4 --ckpt_path runs/digits/version_0/checkpoints/{KEPT}",
        tuple(f"runs/digits/version_0/{file}" for file in ("checkpoints/last.ckpt", "metrics.csv", *SAMPLED)),
        resumed=("digits",),
    ),
    Row(
        "sample digits", f"{{checkout}}/sample.py --ckpt {DIGITS} --num 20 --steps 4 --out {{out}}/s0.npz", ("s0.npz",)
    ),
    Row(
        "sample raw, guided in an interval",
        f"{{checkout}}/sample.py --ckpt {DIGITS} --num 12 --steps 4 --weights raw --guidance-interval 0.2,0.8"
        " --guidance 3 --classes 3,5 --seed 7 --out {out}/s1.npz",
        ("s1.npz",),
    ),
    Row(
        "sample sit, SDE",
        f"{{checkout}}/sample.py --ckpt {SIT} --num 12 --sampler sit-sde --steps 4 --out {{out}}/s2.npz",
        ("s2.npz",),
    ),
    Row(
        "sample sit, dopri5, guide",
        f"{{checkout}}/sample.py --ckpt {SIT} --num 4 --sampler dopri5 --guidance 1.5 --guide-step {STORED}"
        " --out {out}/s3.npz",
        ("s3.npz",),
    ),
    Row(
        "sample the bundled CIFAR-10 network",
        "{checkout}/sample.py --ckpt {checkout}/checkpoints/cifar10.safetensors --num 4 --steps 4 --out {out}/s4.npz",
        ("s4.npz",),
    ),
    Row(
        "evaluate samples",
        f"{{checkout}}/evaluate.py generation --ckpt {DIGITS} --num 300 --steps 4 --reference digits:train"
        " --max-reference 400 --features digits --kid-subset 100 --metrics fd,is,kid,prc --out {out}/report.json",
        ("report.json",),
    ),
    Row(
        "probe digits",
        f"{{checkout}}/evaluate.py probe --ckpt {DIGITS} --data digits {FEW} --times 0.1,0.3 --out {{out}}/probes",
        ("probes/*.csv", "probes/*.json"),
    ),
    Row(
        "noise share",
        f"{{checkout}}/evaluate.py probe --ckpt {DIGITS} --data digits --protocol noise-share --times 0.1,0.3"
        " --noise-draws 2 --noise-images 40 --out {out}/noise",
        (),
        renamed={"noise/probes.csv": "noise/noise_share.csv"},
    ),
    Row(
        "probe sit, ddae",
        f"{{checkout}}/evaluate.py probe --ckpt {SIT} --data digits {FEW} --times 0.2 --protocol ddae --epochs 2"
        " --out {out}/ddae",
        ("ddae/*.csv", "ddae/*.json"),
    ),
    Row(
        "classify mae",
        f"{{checkout}}/evaluate.py classify --ckpt {MAE} --data {{out}}/pictures --test {{out}}/test"
        " --out {out}/classify.json",
        ("classify.json",),
    ),
    Row(
        "reconstruct mae",
        f"{{checkout}}/evaluate.py reconstruct --ckpt {MAE} --images {{out}}/pictures --num 4"
        " --out {out}/reconstructed.png",
        ("reconstructed.png",),
    ),
    Row(
        "export sit",
        f"-m uvit_decay export {SIT} {{out}}/sit.safetensors",
        ("sit.safetensors",),
    ),
    Row("kinds, initial weights", f"{KINDS} draw {{out}}/drawn", ("drawn/*.safetensors",)),
    Row(
        "kinds",
        f"{KINDS} compute {{old}}/drawn {{out}}/kinds",
        tuple(f"kinds/{name} * {precision}.safetensors" for name in NETWORKS for precision in ("float32", "bf16")),
        apart=True,
    ),
    Row(
        "kinds, compiled",
        f"{KINDS} compile {{old}}/drawn {{out}}/compiled",
        ("compiled/*.safetensors",),
        tolerance=COMPILED,
    ),
    Row("learned", TRAIN_LEARNED, LEARNED_FILES, ("EMA", "LastCheckpoint")),
    Row("learned, resumed", f"{TRAIN_LEARNED} {KEPT}", LEARNED_FILES, resumed=LEARNED),
)
