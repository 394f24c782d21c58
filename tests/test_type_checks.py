"""Which modules have the types and shapes of their signatures checked while testing: all but the inner loops."""

import pkgutil

import jaxtyping
import pytest
import torch
from conftest import ROOT

from uvit_decay.diffusion import VP, diffusion_loss
from uvit_decay.metrics import Moments
from uvit_decay.nn import SiT, UViT
from uvit_decay.representations import spectrum_entropy
from uvit_decay.terminal.errors import UserError

SUBPACKAGES = ("decay", "nn", "diffusion", "metrics", "encoders", "evaluation", "representations")
INNER_LOOPS = {
    *(
        "decay.connection",
        "decay.schedule",
        "decay.streams",
        "decay.weights",
        "nn.base",
        "nn.block",
        "nn.embed",
        "nn.inputs",
        "nn.layers",
    ),
    *("diffusion.denoiser", "diffusion.ode", "diffusion.sde", "diffusion.dpm_solver"),
}
IMAGES, LABELS, THREE = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(3)
SIZES = {"image_size": 8, "patch_size": 4, "channels": 3, "dim": 8, "depth": 2, "heads": 2}
WRONG = {  # calls of public functions with one tensor whose shape the signature does not allow
    "UViT": lambda: UViT(**SIZES)(IMAGES, THREE),
    "SiT": lambda: SiT(**SIZES)(IMAGES, THREE),
    "noise path": lambda: VP().add_noise(IMAGES, IMAGES, IMAGES),
    "diffusion_loss": lambda: diffusion_loss(lambda x, t, y: x, VP(), "eps", IMAGES, LABELS, IMAGES, IMAGES),
    "Moments": lambda: Moments(3).update(THREE),
    "spectrum_entropy": lambda: spectrum_entropy(THREE),
}


def list_modules(package: str) -> set[str]:
    folder = ROOT / "uvit_decay" / package
    return {f"{package}.{module.name}" for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg}


def test_every_module_but_the_inner_loops_is_checked(request):
    option = request.config.getoption("--jaxtyping-packages")
    checked = {name.removeprefix("uvit_decay.") for name in option.split(",")}
    for package in SUBPACKAGES:
        modules = list_modules(package)
        expected = {package} if not modules & INNER_LOOPS and package in checked else modules - INNER_LOOPS
        assert {name for name in checked if name.partition(".")[0] == package} == expected


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_tensor_of_another_shape_is_refused_at_public_borders(call):
    with pytest.raises((jaxtyping.TypeCheckError, UserError)):  # the latter from functions at the public door
        call()


def test_sizes_in_a_function_of_the_caller_whose_shapes_are_checked_do_not_count():
    with jaxtyping.jaxtyped("context"):
        for count in (4, 5):
            assert spectrum_entropy(torch.eye(count)) > 0
