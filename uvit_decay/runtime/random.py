"""Random numbers as functions of keys: results do not depend on batch sizes, devices or resumption.

`normal` and `uniform` draw independent numbers for each row (an image, or a position in training), on the device where
they are needed. They are outputs of SplitMix64 (Steele, Lea and Flood 2014) at counters: its initial state is a 64-bit
hash of the key, followed by 2^40 rows of 2^24 outputs. Its increment is odd and its output function is a bijection, so
that all 2^64 outputs of a key differ: no two rows share noise. The integers are the same on every device; logarithms,
sines and cosines agree up to rounding. Rows of two keys overlap, shifted, with a probability of about 4 rows outputs /
2^64, where rows is the number of rows of a key and outputs the number per row: below 1e-5 for 50,000 images of 32x32x3
in 1000 stochastic steps.

`generator` returns a torch.Generator for what is drawn once and in order: permutations, initial weights. torch's CPU
generators use the low 32 bits of the hash: among 10,000 keys, two share a stream with a probability of 1 %.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence, Sized

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from uvit_decay.terminal.errors import UserError, check_whole

ROWS, ROW = 2**40, 2**24  # rows of a key, and numbers of a row
RowNumbers = Sequence[int] | Tensor | np.ndarray  # numbers of rows, or labels


def _to_signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return (word + 2**63) % 2**64 - 2**63


GAMMA, MULTIPLY = _to_signed(0x9E3779B97F4A7C15), (_to_signed(0xBF58476D1CE4E5B9), _to_signed(0x94D049BB133111EB))


def _hash(key: Sequence[str | int]) -> int:
    """Return a 64-bit hash of `key`, by numpy's SeedSequence."""
    low = []
    high = []
    for part in key:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        low.append(number % 2**32)
        high.append(number >> 32)
    words = [len(key), *low]  # SeedSequence ignores trailing zeros, so the length of the key is hashed, too
    if any(high):
        words += high
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def generator(*key: str | int) -> torch.Generator:
    """Return a torch.Generator of the CPU, seeded by `key` (names and non-negative integers)."""
    return torch.Generator("cpu").manual_seed(_hash(key))


def subset(items: Sized, limit: int, name: str) -> list[int]:
    """Return all indices, or `limit` random ones fixed by `name`: the first images of a folder are of few classes."""
    if len(items) <= limit:
        return list(range(len(items)))
    return torch.randperm(len(items), generator=generator("subset", name))[:limit].sort().values.tolist()


def indices_on(device: torch.device | str, indices: Sequence[int]) -> Int64[Tensor, " n"]:
    """Return `indices` as a tensor (n,) on a device, without waiting for what the device still computes."""
    return torch.tensor(indices, dtype=torch.int64).to(device, non_blocking=True)


def list_whole_numbers(name: str, numbers: RowNumbers, most: int) -> list[int]:
    """Return numbers as a list; raise a UserError that names the first that is not an int from 0 to `most`."""
    listed = numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else list(numbers)
    if not isinstance(listed, list):  # of an array without dimensions
        raise UserError(f"{name} must be a sequence of whole numbers, got {listed}")
    for i, number in enumerate(listed):
        check_whole(0, most, **{f"{name}[{i}]": number})
    return listed


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Return a new tensor z >> bits, with z as unsigned 64-bit integers."""
    return z.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def splitmix64(state: int, rows: Int64[Tensor, " b"], count: int) -> Int64[Tensor, "b count"]:
    """Return the outputs row * 2^24, row * 2^24 + 1, ... of SplitMix64 from this state, on the device of `rows`.

    Raises:
        ValueError: more than 2^24 outputs per row, or a row outside [0, 2^40), which is checked on CPUs only.
    """
    if count > ROW or (rows.device.type == "cpu" and ((rows < 0) | (rows >= ROWS)).any()):
        raise ValueError(f"random numbers: at most {ROW:,} in each of {ROWS:,} rows")
    steps = torch.arange(1, count + 1, device=rows.device).mul_(GAMMA)
    z = (rows * _to_signed(GAMMA * ROW) + _to_signed(state))[:, None] + steps
    for bits, factor in zip((30, 27), MULTIPLY, strict=True):
        z.bitwise_xor_(_shift_right(z, bits)).mul_(factor)
    return z.bitwise_xor_(_shift_right(z, 31))


def uniform(*key: str | int, rows: Int64[Tensor, " b"], shape: Sequence[int] = ()) -> Float[Tensor, "b ..."]:
    """Return float32 (b, *shape), uniform in [0, 1), multiples of 2^-24; row i depends only on key and rows[i].

    Args:
        key: names and non-negative integers.
        rows: int64 (b,), on the device where the numbers are drawn.
        shape: shape of a row, at most 2^24 numbers.
    """
    z = splitmix64(_hash(key), rows, math.prod(shape))
    return _shift_right(z, 40).float().mul_(2**-24).reshape(len(rows), *shape)


def normal(*key: str | int, rows: Int64[Tensor, " b"], shape: Sequence[int] = ()) -> Float[Tensor, "b ..."]:
    """Return float32 (b, *shape), standard normal, at most 6.8 in magnitude; same arguments as `uniform`.

    The Box-Muller transform makes two numbers of the two 32-bit halves of an output.
    """
    count = math.prod(shape)
    z = splitmix64(_hash(key), rows, (count + 1) // 2)
    radius = _shift_right(z, 32).float().add_(0.5).mul_(2**-32).log_().mul_(-2).sqrt_()
    angle = z.bitwise_and_(2**32 - 1).float().mul_(2 * math.pi / 2**32)
    pairs = torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)], dim=1)
    return pairs[:, :count].reshape(len(rows), *shape)
