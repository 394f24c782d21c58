"""The public door: arguments of wrong types and impossible values are refused by one line that names the argument."""

import random
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from inspect import isfunction, signature
from typing import Any, get_type_hints

import numpy as np
import pytest
from refusals import raises_user_error
from torch import nn

import uvit_decay as u
from uvit_decay import decay
from uvit_decay.callbacks import EMA
from uvit_decay.decay import attach
from uvit_decay.nn import UViT
from uvit_decay.tasks import Optimization
from uvit_decay.terminal import typed
from uvit_decay.terminal.typed import check_types

SIZES = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 8, "depth": 2, "heads": 2}


# Public names whose arguments are not checked.
UNCHECKED = """
    callbacks.Summary checkpoint.Checkpoint checkpoint.ModelCard
    compare.FinishedRun compare.find_option compare.group_by_options compare.markdown compare.remarks compare.rows
    compare.save_csv compare.save_curves compare.save_final_values compare.save_layers
    data.ImageSet data.InMemory
    decay.Attached decay.Connection decay.Kind decay.Plan decay.Shortcuts
    diffusion.Denoiser diffusion.GVP diffusion.Interpolant diffusion.Linear diffusion.NoisePath
    diffusion.SamplingProtocol diffusion.Times diffusion.VariancePreserving diffusion.trajectory
    doctor.Finding doctor.Plan doctor.Report
    encoders.Extractor encoders.Pretrained encoders.ProbedNetwork encoders.TimmViT encoders.TrainedExtractor
    evaluation.Comparison evaluation.DatasetImages evaluation.FeatureStore evaluation.GeneratedImages
    evaluation.ImageSource evaluation.Metric evaluation.StatisticsFile evaluation.build_report evaluation.write_reports
    generation.LoadingOptions hub.DecayPipeline hub.DecayedDenoiser hub.SiTDenoiser hub.UViTDenoiser
    latents.Autoencoder nn.Layer nn.check_attributes nn.states_of
    representations.Cells representations.Classifying representations.Grid representations.GridProtocol
    representations.LayerTable representations.NoiseTable representations.Outcome representations.PointProtocol
    representations.Prober representations.Protocol representations.TokenReader representations.measure_noise_share
    runs.Measurement runs.guard runtime.Processes tasks.Task terminal.RunEnded terminal.UserError
"""  # they take objects that the package has made, or a wrong argument fails at once
UNCHECKED_IN_LOOPS = "decay.decayed_add diffusion.diffusion_loss nn.pooled nn.timestep_embedding"


class Wrong:
    """A value of no annotated type."""


def list_public():
    """Return the public functions and constructors by name, as the pages of the API, without tuples and protocols."""
    found = {}
    for package in u.SUBPACKAGES:
        module = import_module(f"uvit_decay.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            is_made = isinstance(value, type) and (issubclass(value, tuple) or getattr(value, "_is_protocol", False))
            if (isfunction(value) or isinstance(value, type)) and not is_made:
                found[f"{package}.{name}"] = value
    return found


def find_checked(value):
    """Return the function or constructor that `check_types` has made; None if it does not decorate `value`."""
    function = value.__init__ if isinstance(value, type) else value
    while function is not None:
        if getattr(getattr(function, "__code__", None), "co_filename", None) == typed.__file__:
            return function
        function = getattr(function, "__wrapped__", None)  # the hook of the suite is outside
    return None


@cache
def list_cases():
    """Return (name, function or class, argument, value) of all wrong types, and values outside annotated ranges."""
    cases = []
    for name, value in list_public().items():
        if find_checked(value):
            for argument, hint in read_hints(value).items():
                cases.append((name, value, argument, Wrong()))
                _, notes = typed.split_hint(hint)
                for note in notes:
                    if isinstance(note, typed.Bounds):
                        cases.append((name, value, argument, note.least - 1))
                    elif isinstance(note, typed.Within):
                        cases.append((name, value, argument, float("nan")))
    return cases


def read_hints(value):
    """Return the annotated types of the arguments that are not just any object."""
    call = value.__init__ if isinstance(value, type) else value
    hints = get_type_hints(value if is_dataclass(value) else call, include_extras=True)
    return {name: hints[name] for name in signature(value).parameters if hints.get(name, Any) not in (Any, object)}


@pytest.mark.parametrize("place", range(40))
def test_a_wrong_type_or_value_is_refused_by_a_line_that_names_the_argument(place):
    """Forty places of all, the same in each run."""
    cases = list_cases()
    _, call, argument, value = random.Random(place).choice(cases)
    parameter = signature(call).parameters[argument]
    if parameter.kind is parameter.VAR_POSITIONAL:
        pytest.skip(f"{argument} has no name")
    with raises_user_error(f"`{argument}`"):
        find_checked(call)(*([None] if isinstance(call, type) else []), **{argument: value})


def test_public_names_are_checked():
    unchecked = {name for name, value in list_public().items() if not find_checked(value)}
    assert unchecked == set(UNCHECKED.split() + UNCHECKED_IN_LOOPS.split())


def test_a_line_names_the_argument_the_types_and_the_value():
    with raises_user_error("EMA", "decay", "float", "'x'", "str"):
        EMA(decay="x")
    with raises_user_error("attach", "alpha_min", "float", "'0.7'"):
        attach(nn.Linear(2, 2), "0.7")
    with raises_user_error("Optimization", "lr", "float | None", "'1e-3'"):
        Optimization(lr="1e-3")
    with raises_user_error("UViT", "init", "official", "xavier", "'no'"):
        UViT(**SIZES, init="no")
    with pytest.raises(TypeError, match="alpha"):
        UViT(**SIZES, alpha=0.7)


def test_numbers_of_numpy_lists_and_strings_become_what_is_annotated():
    assert Optimization(betas=[0.9, 0.99]).betas == (0.9, 0.99)
    config = UViT(**SIZES, alpha_min=np.linspace(0.6, 1, 3)[1]).config
    assert type(config["alpha_min"]) is float
    assert type(UViT(**{**SIZES, "dim": np.int64(8)}).config["dim"]) is int


@check_types
def choose(schedule: "decay.Schedule") -> object:
    return schedule


def test_a_name_that_is_added_to_a_table_later_is_accepted(monkeypatch):
    with raises_user_error("choose", "schedule", "linear", "'late'"):
        choose("late")
    monkeypatch.setitem(decay.SHORTCUTS, "late", decay.SHORTCUTS["linear"])
    assert choose("late") == "late"


def test_each_item_of_further_arguments_find_checked():
    @check_types
    def total(start: int, *others: float, **options: object) -> float:
        return start + sum(others)

    assert total(1, 2, 0.5, name="a") == 3.5
    with raises_user_error("total", "others", "float", "'b'"):
        total(1, 2.0, "b")
