"""SiTs that REPA's code trained: without projectors, and as the function of SiT's time and velocity."""

from argparse import Namespace

import pytest
import torch
from official_files import import_and_load, is_close, save_contents, tiny_sit
from reference import layer, random_values
from refusals import find_line
from sit_reference import SMALL, inputs, official_forward

from uvit_decay.checkpoint.convert import read_official
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.diffusion.noise_path import GVP, DDPMLinear, Linear

PLAIN = ImportOptions(heads=2)
ARGUMENTS = dict(model="SiT-XL/2", path_type="linear", prediction="v", weighting="uniform", enc_type="dinov2-vit-b")


def repa_state(seed=1):
    """REPA's `state_dict`: SiT's names and the projectors, three linear maps of `build_mlp` each."""
    shapes = {}
    for number, (rows, columns) in {0: (32, 16), 2: (32, 32), 4: (24, 32)}.items():
        shapes |= layer(f"projectors.0.{number}", rows, columns)
    return tiny_sit(seed=seed) | random_values(shapes, seed)


def repa_training(**arguments):
    """What REPA's train.py saves."""
    parts = {"model": repa_state(2), "ema": repa_state(1), "opt": {"state": {}, "param_groups": []}}
    return parts | {"args": Namespace(**ARGUMENTS | arguments), "steps": 400_000}


def check_function(checkpoint, state):
    """REPA's network reads the time of the noise, which is ours, and returns dx/dt = -(dx/ds) of SiT's time s."""
    x, t, y = inputs(**SMALL)
    with torch.no_grad():
        ours = checkpoint.net(x, t, y)
    assert is_close(-ours, official_forward(state, x, t, y, **SMALL))


@pytest.mark.parametrize(("path_type", "path"), [("linear", Linear()), ("cosine", GVP())])
def test_a_training_file_is_the_published_function_of_its_conventions(tmp_path, path_type, path):
    checkpoint = import_and_load(repa_training(path_type=path_type), tmp_path, PLAIN)
    assert (checkpoint.path, checkpoint.card.prediction, checkpoint.card.step) == (path, "velocity", 400_000)
    check_function(checkpoint, repa_state())


def test_projectors_are_left_out_in_one_remark(tmp_path):
    stored = read_official(save_contents(repa_training(), tmp_path / "last.pt"), None, PLAIN)
    assert [note for note in stored.notes if "projectors" in note] == [find_line(stored.notes, 6, "projectors.*")]
    find_line(stored.notes, "REPA", "velocity")


def test_a_bare_file_is_told_by_its_projectors(tmp_path):
    check_function(import_and_load(repa_state(), tmp_path, PLAIN), repa_state())


def test_the_blocks_of_first_files_follow_one_another(tmp_path):
    """Their names are those that `load_legacy_checkpoints` of REPA's utils.py renames."""
    first = {}
    for name, value in repa_state().items():
        parts = name.split(".")
        if parts[0] == "blocks" and int(parts[1]) > 0:
            name = ".".join(["decoder_blocks", str(int(parts[1]) - 1), *parts[2:]])
        first[name] = value
    check_function(import_and_load(first, tmp_path, PLAIN), repa_state())


def test_projectors_on_a_network_of_other_conventions_change_nothing_else(tmp_path):
    contents = repa_training(path_type="Linear", prediction="velocity")
    x, t, y = inputs(**SMALL)
    for given, options in ((contents, PLAIN), (repa_state(), ImportOptions(heads=2, path="ddpm-linear"))):
        checkpoint = import_and_load(given, tmp_path, options)
        time = 1 - t
        if checkpoint.path == DDPMLinear():
            time = 1000 * t - 1
        with torch.no_grad():
            assert is_close(checkpoint.net(x, t, y), official_forward(repa_state(), x, time, y, **SMALL))
