"""Random pixels that the tests of pictures write to files."""

import numpy as np

SIZE = 8


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
