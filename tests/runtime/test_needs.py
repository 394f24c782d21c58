"""Arguments that have an effect only with certain values of others: one table, one message."""

import pytest
from refusals import raises_user_error

from uvit_decay.callbacks import EMA
from uvit_decay.diffusion.prediction import TrainingTimes
from uvit_decay.representations.probe_options import Classification
from uvit_decay.tasks import REPA
from uvit_decay.tasks.optim.options import Optimization

IGNORED = {
    "cooldown": (Optimization, {"cooldown": 5}, ("`cooldown`", 5, "`schedule` constant", "to wsd")),
    "min_lr": (Optimization, {"min_lr": 1e-5}, ("`min_lr`", "`schedule` constant", "cosine or wsd")),
    "arguments": (Optimization, {"arguments": {"eps": 1e-6}}, ("`arguments`", "`optimizer` adamw")),
    "ramp_steps": (EMA, {"ramp": False, "ramp_steps": 100}, ("`ramp_steps`", 100, "`ramp` False", "True")),
    "hidden": (REPA, {"teacher": "none", "projector": "conv", "hidden": 8}, ("`hidden`", "`projector` conv", "mlp")),
    "zscore": (REPA, {"teacher": "none", "zscore": 0.6}, ("`zscore`", "`projector` mlp", "conv")),
    "mean": (TrainingTimes, {"mean": 1.0}, ("`mean`", "`kind` uniform", "logit-normal")),
    "std": (TrainingTimes, {"std": 0.8}, ("`std`", "`kind` uniform", "logit-normal")),
    "temperature": (Classification, {"uniform": True, "temperature": 0.1}, ("`temperature`", "`uniform` True")),
}


@pytest.mark.parametrize("name", IGNORED)
def test_an_argument_without_effect_is_refused_and_its_default_is_not(name):
    kind, options, words = IGNORED[name]
    with raises_user_error(words):
        kind(**options)
    del options[name]
    if kind is not REPA:  # which would open its teacher
        kind(**options)


def test_the_table_here_has_every_need():
    listed = {(kind, name) for name, (kind, _, _) in IGNORED.items()}
    assert {(kind, name) for kind, _ in listed for name in kind.NEEDS} == listed
