"""The samplers that differ in more than their default number of steps, and the paths that each of them takes."""

from uvit_decay.diffusion.noise_path import GVP, VP, Linear, SDDiscrete
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.runtime.errors import UserError

PATHS = [VP(), SDDiscrete(), Linear(), GVP()]
SAME = {"uvit-em": "euler-maruyama"}  # but for its number of steps, and that it does not clip
NAMES = [name for name in SAMPLERS if name not in SAME]


def sound(name, path):
    """Whether the sampler takes the path."""
    try:
        SAMPLERS[name].check(path)
    except UserError:
        return False
    return True


SOUND = [(name, path) for name in NAMES for path in PATHS if sound(name, path)]
