"""Call each public name with a wrong type and an impossible value for each of its arguments; print what is accepted.

It runs in a process of its own, because the suite's hook checks types as well. A refusal is a UserError that names the
argument, or the path if the argument is one. Prints JSON: "accepted", lines of what was not refused; "uncovered",
numeric, choice and path arguments without an impossible value, and public names that are not called; "inputs", inputs
that networks do not refuse.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from inspect import Parameter, signature
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from door_inputs import DECODER, SIZES, accepted_inputs
from door_values import NOWHERE, find_value, is_checked_later

import uvit_decay as u
from uvit_decay import callbacks, checkpoint, data, decay, diffusion, evaluation, metrics, nn, representations, tasks
from uvit_decay.runtime import typed
from uvit_decay.runtime.errors import UserError

NET = nn.UViT(**SIZES, num_classes=2)
VIT = nn.ViT(**SIZES, num_classes=2, pixels="unit")
MAE = nn.MAE(**SIZES, **DECODER, pixels="unit")
MODEL = diffusion.DiffusionModel.from_net(NET, diffusion.VP(), "eps", torch.device("cpu"))
SAMPLING = diffusion.Sampling(steps=1)
FEATURES = torch.randn(4, 3)
NORM_FIRST = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, norm_first=True))


class OwnLoss(tasks.AuxiliaryLoss):
    """A loss with the constructor of its abstract base class."""

    def forward(self, states, batch, times):
        return times.mean()


# Public names with the arguments that they need.
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    u.UViT: SIZES,
    u.SiT: SIZES,
    u.MAE: SIZES | DECODER | {"pixels": "unit"},
    u.ViT: SIZES | {"pixels": "unit"},
    u.ResNet: {"image_size": 8, "width": 4},
    u.create_model: {"name": "uvit-s/2"},
    u.load: {"path": NOWHERE},
    u.attach: {"model": NORM_FIRST, "alpha_min": 0.7},
    u.shortcuts: {"blocks": 2, "alpha_min": 0.7},
    u.effective_decay: {"alphas": [0.5]},
    u.DiffusionTask: {"net": NET},
    u.MAETask: {"net": MAE},
    u.ClassifyTask: {"net": VIT},
    u.Samples: {"model": MODEL, "sampling": SAMPLING, "weights": "raw"},
    u.generate: {"model": MODEL, "sampling": SAMPLING, "indices": [0], "labels": [0], "seed": 0},
    u.EMA: {},
    u.LinearProbes: {},
    u.GenerationMetrics: {"extractor": metrics.SmallClassifier()},
    u.Preview: {},
    callbacks.BestCheckpoint: {"metric": "fd"},
    callbacks.BranchNorms: {},
    callbacks.CPUThreads: {},
    callbacks.LastCheckpoint: {},
    callbacks.Progress: {},
    callbacks.Reconstructions: {},
    checkpoint.read_training_checkpoint: {"path": NOWHERE},
    data.Augment: {},
    data.AugmentedImages: {"path": NOWHERE},
    data.CIFAR10: {},
    data.CIFAR100: {},
    data.Digits: {},
    data.HubDataset: {"path": NOWHERE},
    data.Images: {"path": NOWHERE},
    data.Latents: {"path": NOWHERE},
    decay.Gated: {"block": "block", "norms": ("norm",)},
    decay.Single: {"first": "conv1", "last": "bn2"},
    decay.alpha_min_for: {"target": 0.1, "branches": 4},
    decay.mixing_matrix: {"of": decay.shortcuts(2, 0.7)},
    decay.weighted: {"alphas": [1.0]},
    diffusion.DDPMLinear: {},
    diffusion.SDDiscrete: {},
    diffusion.SDE: {},
    diffusion.Sampling: {},
    diffusion.TrainingTimes: {"kind": "logit-normal"},
    diffusion.VP: {},
    diffusion.protocol_sampling: {"name": "uvit", "model": MODEL},
    evaluation.MetricOptions: {},
    metrics.DINOv2: {},
    metrics.Inception: {},
    metrics.Moments: {"dim": 3},
    metrics.SmallClassifier: {},
    metrics.inception_score: {"logits": FEATURES},
    metrics.kernel_distance: {"real": FEATURES, "fake": FEATURES, "subset_size": 2},
    metrics.precision_recall: {"real": FEATURES, "fake": FEATURES},
    representations.Classification: {},
    representations.Probing: {},
    OwnLoss: {},
    tasks.DispersiveLoss: {},
    tasks.LayerSync: {},
    tasks.Optimization: {},
    tasks.REPA: {"teacher": NOWHERE},
}
# Decorated names whose arguments are tensors, files or objects, which other tests damage.
OBJECTS = """
    export_file import_official export_folder open_images open_data open_reference save_statistics open_network
    DiffusionModel Sampler sde_sampler generate_uint8 log_likelihood frechet_distance mind label_consistency
    knn_accuracy logistic_grid LinearProbe Reconstructor noise_share FileImages ArrayImages FeatureOptions
    NetworkFeatures spectrum_entropy effective_rank_exp mean_share cknna ImageData RunLogger AuxiliaryLoss
"""


class Wrong:
    """A value of no annotated type."""


def main() -> None:
    accepted = []
    uncovered = list(find_uncalled())
    for call, given in CALLS.items():
        hints = read_hints(call)
        for name, parameter in signature(call).parameters.items():
            hint = hints.get(name, Any)
            if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) or hint in (Any, object):
                continue
            values = list(wrong_types(hint))
            if not is_checked_later(call.__name__, name):
                impossible = find_value(call.__name__, name)
                values += impossible
                if needs_value(hint) and not impossible:
                    uncovered.append(f"{call.__name__}.{name}")
            for value in values:
                accepted += attempt(call, given, name, value)
    print(json.dumps({"accepted": accepted, "uncovered": uncovered, "inputs": accepted_inputs()}))


def find_uncalled() -> Iterator[str]:
    """Yield the public names that should be called here and are not."""
    for name in sorted(set(u.__all__) - set(u.SUBPACKAGES) - {"__version__"}):
        if getattr(u, name) not in CALLS:
            yield name
    for package in u.SUBPACKAGES:
        module = import_module(f"uvit_decay.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if is_decorated(value) and value not in CALLS and name not in OBJECTS.split():
                yield f"{package}.{name}"


def is_decorated(value: Any) -> bool:
    """Return whether `check_types` decorates a function or a constructor."""
    function = value.__init__ if isinstance(value, type) else value
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == typed.__file__


def read_hints(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of the arguments of a function or a constructor."""
    if isinstance(call, type) and not is_dataclass(call):
        return get_type_hints(call.__init__)
    return get_type_hints(call)


def wrong_types(hint: Any) -> Iterator[Any]:
    """Yield values of other types: an object, text for numbers and switches, a number for others, and a dict."""
    parts = set(leaves(hint))
    yield Wrong()
    if parts & {int, float, bool} and str not in parts:
        yield "1"
    if not parts & {int, float}:
        yield 3
    if dict not in parts:
        yield {}


def leaves(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, without the types of their items, and str for a Literal."""
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from leaves(part)
    elif get_origin(hint) is Literal:
        yield str
    else:
        yield get_origin(hint) or hint


def needs_value(hint: Any) -> bool:
    """Return whether an argument is a number, a choice or a path, or a sequence of them."""
    words = set(re.findall(r"\w+", str(hint)))
    return bool(words & {"int", "float", "Literal", "Path"})


def attempt(call: Callable[..., Any], given: dict[str, Any], name: str, value: Any) -> list[str]:
    """Return a line if a call with this value is not refused by a UserError that names the argument or the value."""
    case = f"{call.__name__}({name}={value!r:.40})"
    names = [name, name.replace("_", "-")]
    if value == NOWHERE:
        names.append(NOWHERE)
    try:
        call(**{**given, name: value})
    except UserError as error:
        if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(error)) for word in names):
            return []
        return [f"{case}: {error}"]
    except Exception as error:
        return [f"{case}: {type(error).__name__} {error}"[:300]]
    return [f"{case}: accepted"]


if __name__ == "__main__":
    main()
