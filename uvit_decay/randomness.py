"""Random numbers as functions of names and numbers: results do not depend on batch sizes, devices or resumption.

`normal` and `uniform` give each row (an image, a position in training) numbers of its own, on the device where they are
needed. They are SplitMix64 (Steele, Lea and Flood 2014) at counters: a 64-bit hash of the key is its state before the
first of 2^40 rows of 2^24 outputs. Its steps are odd and its last function is one to one, so that all 2^64 outputs of a
key differ: no two rows share noise. The integers are the same on every device, their logarithms, sines and cosines to
the last digits. Rows of two keys overlap, shifted, with a chance of about 4 rows outputs / 2^64, where rows is how many
a key has and outputs how many a row takes: below 1e-5 for 50,000 images of 32x32x3 in 1000 noisy steps.

`generator` is a torch.Generator for what is drawn once and in order: permutations, initial weights. torch's CPU
generators use the low 32 bits of that hash: of 10,000 keys, two share a stream with a chance of 1 %.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

ROWS, ROW = 2**40, 2**24  # rows of a key, and numbers of a row


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return (word + 2**63) % 2**64 - 2**63


GAMMA, MULTIPLY = _signed(0x9E3779B97F4A7C15), (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _hash(key: Sequence[str | int]) -> int:
    """64 bits that are a function of `key`, by numpy's SeedSequence."""
    parts = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
    low, high = [part % 2**32 for part in parts], [part >> 32 for part in parts]
    words = [len(key), *low, *(high if any(high) else ())]  # SeedSequence does not tell trailing zeros from nothing
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def generator(*key: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch.Generator that is a function of `key` (names and non-negative integers) and of the kind of device."""
    return torch.Generator(device).manual_seed(_hash(key))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A new z >> bits of the unsigned 64-bit integer."""
    return z.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def splitmix64(state: int, rows: Int64[Tensor, " b"], count: int) -> Int64[Tensor, "b count"]:
    """Outputs row * 2^24, row * 2^24 + 1, ... of SplitMix64 from this state, on the device of `rows`.

    Raises:
        ValueError: more than 2^24 outputs of a row, or a row outside [0, 2^40), which is looked for on CPUs only.
    """
    if count > ROW or (rows.device.type == "cpu" and ((rows < 0) | (rows >= ROWS)).any()):
        raise ValueError(f"random numbers: at most {ROW:,} in each of {ROWS:,} rows")
    steps = torch.arange(1, count + 1, device=rows.device).mul_(GAMMA)
    z = (rows * _signed(GAMMA * ROW) + _signed(state))[:, None] + steps
    for bits, factor in zip((30, 27), MULTIPLY, strict=True):
        z.bitwise_xor_(_shifted(z, bits)).mul_(factor)
    return z.bitwise_xor_(_shifted(z, 31))


def uniform(*key: str | int, rows: Int64[Tensor, " b"], shape: Sequence[int] = ()) -> Float[Tensor, "b ..."]:
    """Float32 (b, *shape), uniform in [0, 1), multiples of 2^-24; row i is a function of the key and of rows[i] alone.

    Args:
        key: names and non-negative integers.
        rows: int64, on the device where the numbers are drawn.
        shape: of a row, of at most 2^24 numbers.
    """
    z = splitmix64(_hash(key), rows, math.prod(shape))
    return _shifted(z, 40).float().mul_(2**-24).reshape(len(rows), *shape)


def normal(*key: str | int, rows: Int64[Tensor, " b"], shape: Sequence[int] = ()) -> Float[Tensor, "b ..."]:
    """Float32 (b, *shape), standard normal, at most 6.8 in size; otherwise as `uniform`.

    Two numbers come of the halves of an output, by Box and Muller's transform.
    """
    count = math.prod(shape)
    z = splitmix64(_hash(key), rows, (count + 1) // 2)
    radius = _shifted(z, 32).float().add_(0.5).mul_(2**-32).log_().mul_(-2).sqrt_()
    angle = z.bitwise_and_(2**32 - 1).float().mul_(2 * math.pi / 2**32)
    pairs = torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)], dim=1)
    return pairs[:, :count].reshape(len(rows), *shape)
