"""Arguments that have an effect only with certain values of others: one mechanism, one message."""

import pytest
from refusals import raises_user_error

from uvit_decay.callbacks import EMA
from uvit_decay.representations.probe_options import Classification
from uvit_decay.tasks.optim.options import Optimization

IGNORED = {
    "cooldown": (Optimization, {"cooldown": 5}, ("`cooldown`", 5, "`schedule` constant", "to wsd")),
    "min_lr": (Optimization, {"min_lr": 1e-5}, ("`min_lr`", "`schedule` constant", "cosine or wsd")),
    "ramp_steps": (EMA, {"ramp": False, "ramp_steps": 100}, ("`ramp_steps`", 100, "`ramp` False", "True")),
    "temperature": (Classification, {"uniform": True, "temperature": 0.1}, ("`temperature`", "`uniform` True")),
}


@pytest.mark.parametrize("name", IGNORED)
def test_an_argument_without_effect_is_refused_and_its_default_is_not(name):
    kind, options, words = IGNORED[name]
    with raises_user_error(words):
        kind(**options)
    del options[name]
    kind(**options)
