"""Command lines from functions: what is accepted, shown and refused."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from refusals import raises_user_error

from uvit_decay.terminal.command_line import parse, respell, run
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import Bounds, check_types


@dataclass(frozen=True)
class Loading:
    """how a checkpoint is read

    Args:
        weights: default: EMA
        trust: class to allow.
    """

    weights: Literal["ema", "raw"] | None = None
    trust: Sequence[str] = ()


@check_types
@dataclass(frozen=True)
class Sampling(Loading):
    """how a checkpoint samples

    Args:
        seed: of the noise; 100 % of it.
        clip: clamp, whatever
            the sampler.
    """

    seed: Annotated[int, Bounds(0, 9)] = 0
    clip: bool | None = None
    classes: tuple[int, ...] | None = None
    interval: tuple[float, float] = (0.0, 1.0)


Count = Annotated[int, Bounds(1, 100)]


def make(*, ckpt: Path, num: Annotated[Count | None, "-n"] = None, quick: bool = False, how: Sampling):
    """Make images.

    More about it.

    Args:
        ckpt: a file.
        num: images; default: all.

    Raises:
        UserError: a reason.
    """
    return ckpt, num, quick, how


def compare(runs: Sequence[Path], *, by: str = "alpha_min"):
    """Compare runs."""
    return runs, by


def called(*words):
    return parse(make, ["--ckpt", "a.ckpt", *words])()


def test_options_have_the_types_and_defaults_of_the_signature():
    assert called() == (Path("a.ckpt"), None, False, Sampling())
    words = ["-n", "7", "--quick", "--weights", "raw", "--seed", "3", "--no-clip", "--classes", "1,2"]
    words += ["--interval", "0,.5", "--trust", "a.B", "--trust", "c.D"]
    sampling = Sampling("raw", ["a.B", "c.D"], 3, False, (1, 2), (0.0, 0.5))
    assert called(*words) == (Path("a.ckpt"), 7, True, sampling)
    assert called("--num", "9", "--clip")[1::2] == (9, Sampling(clip=True))
    words = ["--seed", "1", "--classes", "1,2", "--seed", "2", "--classes", "3"]  # such as "$OPTIONS --seed 2"
    assert called(*words)[3] == Sampling(seed=2, classes=(3,))


def test_subcommands_have_the_options_of_their_functions():
    commands = {"make": make, "compare": compare}
    assert parse(commands, ["compare", "a", "b"])() == ([Path("a"), Path("b")], "alpha_min")
    assert parse(commands, ["make", "--ckpt", "b"])()[0] == Path("b")


def test_hyphens_and_underscores_are_one():
    def function(batch_size: int = 1, save_samples: str = ""):
        return batch_size, save_samples

    for words in (["--batch-size", "2", "--save-samples=a_b-c"], ["--batch_size=2", "--save_samples", "a_b-c"]):
        assert parse(function, words)() == (2, "a_b-c")
    words = ["fit", "--data.batch-size=8", "--model.net-x", "-5", "a-b"]
    assert respell(words, "-", "_") == ["fit", "--data.batch_size=8", "--model.net_x", "-5", "a-b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num", "0"], ("--num", 1, 100, 0)),
        (["--seed", "10"], ("--seed", 0, 9, 10)),
        (["--classes", "-1,2"], "--classes=-1,2"),
        (["--num", "many"], ("-n/--num", "'many'")),
        (["--num", "2.7"], ("-n/--num", "'2.7'")),
        (["--weights", "none"], ("--weights", "'none'")),
        (["--classes", "cat"], ("--classes", "cat")),
        (["--interval", "1"], ("--interval", 2, 1)),
        (["--magic"], "--magic"),
        (["--wieghts", "ema"], ("--wieghts", "--weights")),
    ],
)
def test_a_wrong_option_is_one_line(words, message):
    with raises_user_error(message):
        called(*words)


def test_errors_name_the_flags_of_the_arguments():
    """The flag of a parameter may have another name; an argument that is no option keeps its name."""

    def draw(*, images: Annotated[int, "--pictures"] = 1, batch_size: int = 1, clip: bool | None = None):
        raise UserError("with `batch_size`, `clip` and `holdout`", argument="images")

    with raises_user_error("`images`: with `batch_size`, `clip` and `holdout`"):
        draw()
    with raises_user_error("--pictures: with --batch-size, --clip and `holdout`"):
        parse(draw, [])()


def test_a_usage_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    for commands, message in (
        ({"make": make}, "error: the following arguments are required: command"),
        (make, "error: the following arguments are required: --ckpt"),
    ):
        monkeypatch.setattr(sys, "argv", ["script.py"])
        with pytest.raises(SystemExit) as stop:
            run(commands, "about")
        assert stop.value.code == 2
        assert capsys.readouterr().err == message + "\n"


def test_help_comes_from_signatures_and_docstrings(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")

    def text(*words):
        with pytest.raises(SystemExit):
            parse({"make": make, "compare": compare}, [*words, "--help"], "All about it.")
        return capsys.readouterr().out

    whole, one = text(), text("make")
    assert "All about it." in whole
    assert " make  " in whole
    assert "Make images\n" in whole
    assert "More about it." in one
    assert "Raises" not in one
    assert "how a checkpoint samples:\n" in one
    for words in ("-n NUM, --num NUM", "images; default: all\n", "{ema,raw}", "class to allow\n", "--clip, --no-clip"):
        assert words in one
    assert "of the noise; 100 % of it" in one
    assert "clamp, whatever the sampler" in one
    assert "default: 0.0,1.0" in one
