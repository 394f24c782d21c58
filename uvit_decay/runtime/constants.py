"""Numbers and types that rooms share which do not import one another."""

from typing import Literal

LEVELS = 1000  # noise levels of a discrete schedule, n = 1..LEVELS at t_n = n / LEVELS
LEVEL_ROUNDING = 1e-3  # tolerance of LEVELS t, since float32 does not represent t_n exactly
TIME_ROUNDING = 1e-6  # tolerance in comparisons of float32 times
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of red, green and blue in [0, 1]
IMAGENET_STD = (0.229, 0.224, 0.225)

Pool = Literal["mean", "all", "cls"]  # how token states become features: patch tokens, all tokens, the class token
