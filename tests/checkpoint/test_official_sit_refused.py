"""SiT files that are not quite one, or whose decay nobody told: each is refused in one line."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import same
from official_files import imported, tiny_sit
from sit_reference import loaded

from uvit_decay.checkpoint.convert import import_official
from uvit_decay.checkpoint.official.common import ImportOptions
from uvit_decay.runtime.errors import UserError

PLAIN = ImportOptions(heads=2)


def changed(remove=(), options=None, **entries):
    state = {name: value for name, value in tiny_sit(**options or {}).items() if name not in remove}
    return state | {name.replace("__", "."): value for name, value in entries.items()}


def without(prefix, **options):
    return {name: value for name, value in tiny_sit(**options).items() if not name.startswith(prefix)}


DECAYED = dict(wiring="decayed")
HEAD = dict(final_layer__linear__weight=torch.zeros(24, 16), final_layer__linear__bias=torch.zeros(24))
MISFITS = {
    "no-head": (changed(["final_layer.linear.weight"]), r"but it lacks final_layer\.linear\.weight"),
    "no-blocks": (without("blocks."), r"but it lacks blocks\.0\.mlp\.fc1\.weight"),
    "half": (without("dec_blocks.", **DECAYED), r"but it lacks dec_blocks\.0\.skip\.weight"),
    "no-skip": (changed(["dec_blocks.1.skip.bias"], DECAYED), r"but it lacks dec_blocks\.1\.skip\.bias"),
    "both": (tiny_sit() | tiny_sit(**DECAYED), r"but it has blocks\.0\..*, which no official SiT has"),
    "shape": (changed(t_embedder__mlp__2__bias=torch.zeros(9)), r"its t_embedder\.mlp\.2\.bias has the shape \(9,\)"),
    "head": (changed(**HEAD), "but the head has 24 rows, a patch of 2x2x4 needs 16 or 32"),
    "bias": (changed(final_layer__linear__bias=torch.zeros(17)), r"its final_layer\.linear differ in rows"),
    "wider-table": (changed(y_embedder__embedding_table__weight=torch.zeros(4, 17)), r"has the shape \(4, 17\)"),
}


@pytest.mark.parametrize(("state", "message"), MISFITS.values(), ids=MISFITS)
def test_a_sit_that_does_not_fit_is_refused_with_what_is_wrong(tmp_path, state, message):
    with pytest.raises(UserError, match=f"official.pth .*{message}"):
        imported(state, tmp_path, ImportOptions(heads=2, alpha_min=1.0))
    assert not (tmp_path / "ours.safetensors").exists()


HINTS = [
    (dict(), dict(num_classes=2), "has 4 rows .*--num-classes is 4 without .* or 3 with one"),
    (DECAYED, dict(), r"is a decayed SiT, whose weights do not determine alpha_min: give it with --alpha-min .*0\.8"),
]


@pytest.mark.parametrize(("options", "hints", "message"), HINTS)
def test_a_hint_that_is_missing_or_does_not_fit_is_said(tmp_path, options, hints, message):
    with pytest.raises(UserError, match=message):
        imported(tiny_sit(**options), tmp_path, ImportOptions(**{"heads": 2, **hints}))


def test_recorded_alphas_must_be_those_that_are_said(tmp_path):
    for options in (dict(), DECAYED):
        state = loaded(**options, alpha_min=0.7).state_dict()
        with pytest.raises(UserError, match=r"alphas from 1 to 0\.7, not with alpha_min 1: give --alpha-min 0\.7"):
            imported(state, tmp_path, PLAIN)
        assert same(imported(state, tmp_path, ImportOptions(heads=2, alpha_min=0.7)).net.state_dict(), state)
    ordinary = loaded(wiring="decayed").state_dict()
    assert same(imported(ordinary, tmp_path, PLAIN).net.state_dict(), ordinary), "its alphas tell that they are 1"


# ---- training files


class Code:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


@pytest.mark.parametrize("args", [Namespace(ckpt=Code()), SimpleNamespace(ckpt=None), Code()])
@pytest.mark.parametrize("zipped", [True, False])
def test_arguments_of_another_class_or_with_code_are_refused(tmp_path, args, zipped):
    path = tmp_path / "0000007.pt"
    torch.save({"ema": tiny_sit(), "args": args}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match="could run code: refused"):
        import_official(path, tmp_path / "ours.safetensors", None, PLAIN)


TRAINING = {
    "no-ema": ({"model": tiny_sit()}, PLAIN, "has no entry 'ema', the ema weights: give --weights raw"),
    "empty-ema": (
        {"model": tiny_sit(), "ema": {}},
        PLAIN,
        "is no official U-ViT, SiT or MAE, it looks like an empty dict",
    ),
    "path": (
        {"ema": tiny_sit(), "args": Namespace(path_type="Cosine")},
        PLAIN,
        "was trained with path_type Cosine, which is not known here: give --path",
    ),
    "decay": (
        {"ema": tiny_sit(**DECAYED), "args": Namespace(min_sigma=0.8)},
        ImportOptions(heads=2, alpha_min=0.7),
        r"was trained with min_sigma 0\.8, not with alpha_min 0\.7: leave out --alpha-min",
    ),
    "no-decay": ({"ema": tiny_sit(**DECAYED), "args": Namespace(min_sigma=None)}, PLAIN, "give it with --alpha-min"),
}


@pytest.mark.parametrize(("contents", "hints", "message"), TRAINING.values(), ids=TRAINING)
def test_a_training_file_that_lacks_something_is_refused(tmp_path, contents, hints, message):
    with pytest.raises(UserError, match=message):
        imported(contents, tmp_path, hints)
