"""Command lines of train.py that are refused before heavy imports, and all that must not be."""

import inspect
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from refusals import find_line, raises_user_error

import uvit_decay
from uvit_decay import callbacks, data, diffusion, nn, tasks
from uvit_decay.commands.train import launch
from uvit_decay.commands.train import words as first_check
from uvit_decay.commands.train.help import FIT_FLAGS, SUBCOMMANDS
from uvit_decay.commands.train.words import CONFIG_FLAGS, check_words

CONFIG = ["--config", str(ROOT / "configs" / "digits.yaml")]
MISTAKES = {
    "fitt": ("fitt", "fit?"),
    "fit --config nosuch": ("--config nosuch", "digits"),
    "fit --ckpt_path missing.ckpt": ("missing.ckpt",),
    "fit --trainer.max_step 3": ("--trainer.max_step;", "--trainer.max_steps"),
    "doctor --max-step 3": ("--max_step;", "--trainer.max_steps"),
    "fit --model.net.alpha_mn 1": ("--model.net.alpha_mn;", "--model.net.alpha_min?"),
    "fit --model.net.qk_nrm true": ("--model.net.qk_nrm;", "--model.net.qk_norm?"),
    "fit --model.net.foo_bar_baz 1": ("--model.net.foo_bar_baz",),
    "fit --model.optim.momentm 0.9": ("--model.optim.momentm;", "--model.optim.momentum?"),
    "fit --model.sampling.stepps 3": ("--model.sampling.stepps;", "--model.sampling.steps?"),
    "fit --data.bath_size=3": ("--data.bath_size;", "--data.batch_size?"),
    "fit --data Images --data.path nosuch": ("nosuch", "folder"),
}


def test_mistakes_are_answered_before_heavy_imports():
    program = f"""
import sys
from uvit_decay.commands.train import main
for words in {[line.split() for line in MISTAKES]!r}:
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == 2
    assert not {{"torch", "lightning", "jsonargparse", "numpy"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    for line, named in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        find_line(line, "error:", *named)


@pytest.fixture(scope="module")
def flags(request) -> list[str]:
    """All flags of the parsers of fit and validate."""
    found = []

    def remember(self, parser, args):
        found.extend(self._parser(args[0])._option_string_actions)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.CLI, "parse_arguments", remember)
        for name in SUBCOMMANDS:
            with pytest.raises(SystemExit):
                launch.CLI.run([name, *CONFIG])
    return found


def test_no_flag_of_the_parser_is_refused(flags):
    assert len(flags) > 100
    check_words([*CONFIG, *(flag for flag in (*flags, *FIT_FLAGS) if flag not in CONFIG_FLAGS)])


def _find_classes():
    """Return the classes that a configuration may name in the groups model and data."""
    for package in (nn, tasks, data, diffusion, callbacks):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value):
                yield value
    yield uvit_decay.tasks.base.Optimization


def test_no_argument_of_a_class_is_refused_and_those_that_take_any_key_are_known():
    names = set()
    for kind in _find_classes():
        for parameter in inspect.signature(kind).parameters.values():
            names.add(parameter.name)
            takes_keys = re.search(r"\b(dict|Mapping)\b", str(parameter.annotation))
            assert not takes_keys or parameter.name in first_check.ANYTHING, (kind, parameter)
    assert len(names) > 100
    for group in ("model", "model.net", "data", "model.net.init_args"):
        check_words([*CONFIG, *(f"--{group}.{name}=1" for name in names)])


@pytest.mark.parametrize(
    "words",
    [
        ["--trust", "mine", "--model.net", "mine.Net", "--model.net.alpha_mn", "1"],
        ["--model.net", "torch.nn.Linear", "--model.net.alpha_mn", "1"],
        ["--model.optim.arguments.alpha_mn", "1"],
        ["--model.net.dict_kwargs.alpha_mn", "1"],
        ["--trainer.logger.alpha_mn", "1"],
        ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.9"],
        ["--ckpt_path", "null", "--ckpt_path=~", "--ckpt_path", "last", "--data.path=null"],
        ["--ckpt_path", "missing.ckpt", "--ckpt_path=auto"],
        ["--ckpt_path", "missing.ckpt", *CONFIG],
        ["--data.path", "no/such", "--data", "HubDataset"],
        ["--data", "Images", "--data.path", "no/such", *CONFIG],
        ["--data", "Images", "--data.path", "FOLDER", "--ckpt_path", "missing.ckpt", "--print_config"],
        ["--config", "seed_everything: 1"],
        ["--seed_everything", "-1", "--trainer.max_time", "00:00:01:00", "a value", "--a value of words"],
    ],
)
def test_what_it_cannot_tell_is_left_to_the_parser(words):
    check_words([*CONFIG, *words])


def test_a_configuration_with_foreign_classes_knows_no_flags(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("model:\n  init_args:\n    net:\n      class_path: torch.nn.Linear\n")
    check_words(["--config", str(path), "--model.net.alpha_mn=1"])
    with raises_user_error("--model.net.alpha_mn"):
        check_words([*CONFIG, "--model.net.alpha_mn=1"])
