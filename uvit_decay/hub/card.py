"""README.md of a folder for diffusers: what the model is, how to use it, how it was trained, measured and licensed.

Its metadata are those of the Hub (huggingface_hub writes them), with the measured numbers in machine-readable form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub import ModelCard as Readme

from uvit_decay import __version__
from uvit_decay.checkpoint import Checkpoint
from uvit_decay.checkpoint.official.common import IMPORTED
from uvit_decay.class_names import in_words
from uvit_decay.hub.measured import CONFIGURATION, Evaluation, of_report, of_run, public, recorded_run
from uvit_decay.runtime.plain import read_yaml

README, GRID = "README.md", "samples.png"
TEMPLATE = Path(__file__).with_name("card.md.j2")
TASK = "unconditional-image-generation"  # the only one of the Hub for images without text, also by class
HUB_DATA = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}  # our names of sets: those of the Hub
FEW = 20  # classes whose names are listed
TRAINING = ("model", "data.batch_size", "trainer.precision", "trainer.accumulate_grad_batches", "seed_everything")
KNOWN = ("model.net.", "model.path.", "model.sampling.", "model.prediction")  # these are facts of the model


def evaluations(source: Path, checkpoint: Checkpoint, reports: Sequence[Path]) -> list[Evaluation]:
    """Return what is known of these weights: from the run that wrote `source`, and from reports of evaluate.py."""
    run = recorded_run(source)
    measured = [] if run is None else of_run(run, checkpoint)
    return measured + [of_report(file, checkpoint) for file in reports]


def model_card(
    checkpoint: Checkpoint,
    name: str,
    measured: Sequence[Evaluation] = (),
    settings: Mapping[str, Any] | None = None,
    grid: str | None = None,
    license: str | None = None,
    alone: bool = False,
) -> Readme:
    """Return the README.md of a folder with this denoiser.

    Args:
        checkpoint: the exported weights, and what is known of them.
        name: name of the model, that of its folder.
        measured: measured numbers, those of these weights.
        settings: further settings of the training, flat.
        grid: file name of a picture of samples; None if there is none.
        license: licence of the weights, by its short name; None if it is not known.
        alone: whether the folder works without this package.
    """
    return Readme.from_template(
        _metadata(checkpoint, name, measured, license),
        template_path=str(TEMPLATE),
        name=cell(name),
        place=repr(name),
        sentence=_sentence(checkpoint),
        needs=_needs(alone),
        call=_call(checkpoint),
        classes=checkpoint.net.num_classes,
        facts={key: cell(value) for key, value in _facts(checkpoint).items()},
        settings={key: cell(value) for key, value in (settings or {}).items()},
        evaluations=[_of_cells(evaluation) for evaluation in measured],
        grid=grid,
        licence=_licence(checkpoint, license),
        version=__version__,
    )


def settings_of(run: Path | None) -> dict[str, Any]:
    """Return the settings of a run's training that its checkpoint does not tell, flat; paths lose their folders."""
    if run is None:
        return {}
    values = public(read_yaml(run / CONFIGURATION))
    return {name: value for name, value in values.items() if name.startswith(TRAINING) and not name.startswith(KNOWN)}


def cell(value: Any) -> str:
    """Return a value as text of one line that leaves a table of Markdown whole; names may come from any file."""
    return re.sub(r"([|<>`*\[\]\\])", r"\\\1", " ".join(str(value).split()))


def _of_cells(evaluation: Evaluation) -> dict[str, Any]:
    numbers = [{"title": cell(number.title), "text": cell(number.text)} for number in evaluation.numbers]
    about = {"data": cell(evaluation.data), "name": cell(evaluation.name)}
    return {**about, "numbers": numbers, "remarks": [cell(remark) for remark in evaluation.remarks]}


def _metadata(checkpoint: Checkpoint, name: str, measured: Sequence[Evaluation], license: str | None) -> ModelCardData:
    found = [result for evaluation in measured for result in _results(evaluation)]
    data = HUB_DATA.get(checkpoint.data)
    conditional = "class-conditional" if checkpoint.net.num_classes else "unconditional"
    return ModelCardData(
        library_name="diffusers",
        pipeline_tag=TASK,
        license=license or "unknown",
        tags=["uvit_decay", "decayed-identity-shortcuts", type(checkpoint.net).__name__.lower(), conditional],
        datasets=data and [data],
        model_name=name if found else None,
        eval_results=found or None,
    )


def _results(evaluation: Evaluation) -> list[EvalResult]:
    """Return the numbers in the Hub's form; their names contain the whole protocol."""
    task = {"generation": TASK, "probe": "image-classification"}[evaluation.task]
    return [
        EvalResult(
            task_type=task,
            dataset_type=HUB_DATA.get(evaluation.data, evaluation.data),
            dataset_name=evaluation.data,
            metric_type=number.name,
            metric_value=number.value,
            metric_name=f"{number.title} ({evaluation.name})",
            metric_args=dict(evaluation.protocol),
        )
        for number in evaluation.numbers
    ]


def _sentence(checkpoint: Checkpoint) -> str:
    net = checkpoint.net
    kind = "class-conditional" if net.num_classes else "unconditional"
    what = f"latents of {net.channels} channels" if checkpoint.latents else "pixels"
    return (
        f"A {kind} {type(net).__name__} that makes {what}, {net.image_size}x{net.image_size}, with [decayed identity "
        f"shortcuts](https://arxiv.org/abs/2404.10947): {cell(_shortcuts(checkpoint))}."
    )


def _shortcuts(checkpoint: Checkpoint) -> str:
    shortcuts, config = checkpoint.net.shortcuts, checkpoint.net.config
    count = f"{len(shortcuts.alphas)} residual branches"
    if set(shortcuts.alphas) == {1.0} and not shortcuts.learnable:
        return f"none, alpha is 1 in all {count}"
    learned = "learned, initially " if shortcuts.learnable else ""
    return (
        f"alpha falls with depth, {learned}from {shortcuts.alphas[0]:.4g} to {shortcuts.alphas[-1]:.4g} over {count} "
        f"(alpha_min {config['alpha_min']}, schedule {config['schedule']}, granularity {config['granularity']}, "
        f"index {config['index']}, branches {config['branches']})"
    )


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what the checkpoint tells, by titles."""
    net, latents = checkpoint.net, checkpoint.latents
    path = {"path": type(checkpoint.path).__name__, **asdict(checkpoint.path)}
    facts = {
        "network": f"{type(net).__name__}: {_listed(net.config)}",
        "parameters": f"{sum(parameter.numel() for parameter in net.parameters()):,}",
        "identity shortcuts": _shortcuts(checkpoint),
        "noise path": _listed(path),
        "prediction": str(checkpoint.prediction),
        "weights": f"{checkpoint.weights}, after {checkpoint.step:,} optimizer steps",
        "training data": checkpoint.data,
        "classes": _classes(checkpoint),
        "recommended sampling": _listed(checkpoint.sampling.metadata()),
    }
    return facts | ({} if latents is None else {"autoencoder": Path(latents.vae).name})


def _classes(checkpoint: Checkpoint) -> str:
    names = in_words(checkpoint.class_names)
    if not names:
        return "none"
    return f"{len(names)}: {', '.join(names) if len(names) <= FEW else 'named in model_index.json (id2label)'}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in public(values).items())


def _needs(alone: bool) -> str:
    if alone:
        return "Needs diffusers and the packages that the files of Python here import; not uvit_decay itself:"
    return f"Needs diffusers and uvit_decay {__version__}, whose classes the files of Python here import:"


def _call(checkpoint: Checkpoint) -> str:
    count = min(checkpoint.net.num_classes, 4)
    return f"class_labels={list(range(count))}" if count else "num_images=4"


def _licence(checkpoint: Checkpoint, license: str | None) -> str:
    if license is not None:
        return f"The weights: {license}. The code of uvit_decay: MIT."
    if checkpoint.data.startswith(IMPORTED):
        return (
            "Not recorded: these weights were imported, so their licence is that of their publisher. Name it here and "
            "in the metadata (`--license` of the export) before you share them. The code of uvit_decay: MIT."
        )
    return (
        "Not chosen yet: set it here and in the metadata (`--license` of the export) before you share the weights, and "
        "mind that of the training data. The code of uvit_decay: MIT."
    )
