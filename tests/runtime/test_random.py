"""Random numbers are functions of keys and rows: SplitMix64, whatever the batch, its order and the device."""

import math

import numpy as np
import pytest
import torch
from record_ops import RecordOps
from scipy import stats

from uvit_decay.data.batches import Batch
from uvit_decay.runtime.random import ROW, ROWS, generator, normal, splitmix64, uniform

VECTOR = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
KEYS = [("noise", 0, 0), ("noise", 0, 1), ("noise", 1, 0), ("noise", 1, 1), ("noise", 10**6, 3), ("times", 0, 0)]
KEYS += [("noise", 2**32, 0), ("noise", 2**33, 0), ("noise", 0, 2), ("noise", 0), ("noise",), ("noise", 2**70, 0)]
DRAWS = [uniform, normal]


def rows(*numbers):
    return torch.tensor(numbers)


def unsigned(z):
    return z.numpy().view(np.uint64)


def reference(seed, count):
    """SplitMix64 as it is published, in Python's whole numbers."""
    state, out = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return out


def test_the_integers_are_the_published_ones_of_splitmix64():
    assert unsigned(splitmix64(1234567, rows(0), 5))[0].tolist() == VECTOR == reference(1234567, 5)
    assert unsigned(splitmix64(2**64 - 3, rows(0), 999))[0].tolist() == reference(2**64 - 3, 999)
    jump = 0x9E3779B97F4A7C15 * ROW  # of one row
    found = unsigned(splitmix64(7, rows(5, 0, ROWS - 1), 40))
    assert found.tolist() == [reference((7 + row * jump) % 2**64, 40) for row in (5, 0, ROWS - 1)]


def test_a_million_outputs_of_a_key_differ():
    assert len(splitmix64(99, torch.arange(1000), 1000).unique()) == 10**6


@pytest.mark.parametrize("draw", DRAWS)
def test_keys_differ_and_repeat(draw):
    found = [draw(*key, rows=rows(3, 4), shape=(5,)) for key in KEYS]
    assert all(torch.equal(draw(*key, rows=rows(3, 4), shape=(5,)), own) for key, own in zip(KEYS, found, strict=True))
    assert len(torch.stack(found).flatten().unique()) == 10 * len(KEYS)
    assert len({generator(*key).initial_seed() for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4, 5), (1, 2, 1)])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_row_is_a_function_of_its_number_alone(draw, shape):
    whole = draw("noise", 3, rows=torch.arange(20), shape=shape)
    assert (whole.shape, whole.dtype) == ((20, *shape), torch.float32)
    for chosen in ([4], [0, 1, 2], [19, 3, 11], []):
        assert torch.equal(draw("noise", 3, rows=torch.tensor(chosen).long(), shape=shape), whole[chosen])


def test_the_parts_of_a_batch_draw_what_one_process_draws():
    def draw(number, first, count):
        part = Batch(torch.empty(count, 1), torch.empty(count), number, first, 30)
        return normal("noise", rows=part.sample_ids, shape=(4,))

    whole = torch.cat([draw(k, 0, 30) for k in range(3)])
    parts = [draw(k, first, count) for k in range(3) for first, count in ((0, 10), (10, 1), (11, 19))]
    assert torch.equal(torch.cat(parts), whole)
    assert len(whole.unique()) == whole.numel(), "no position of a run shares numbers with another"


@pytest.mark.parametrize("draw", DRAWS)
def test_the_global_stream_is_left_alone(draw):
    torch.manual_seed(0)
    wanted = torch.rand(4)
    torch.manual_seed(0)
    draw("noise", rows=rows(0))
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_are_made_where_the_rows_are_by_a_few_operations(draw):
    """On the meta device a value that is looked at raises."""
    counts = []
    for batch, shape in ((2, ()), (256, (3, 64, 64))):
        with RecordOps() as recorder:
            made = draw("noise", rows=torch.empty(batch, dtype=torch.int64, device="meta"), shape=shape)
        assert (made.device.type, made.shape) == ("meta", (batch, *shape))
        counts.append(len(recorder.ops))
    assert max(counts) <= 50, recorder.ops


@pytest.mark.parametrize("numbers", [[-1], [0, ROWS]])
def test_rows_that_would_meet_are_refused(numbers):
    with pytest.raises(ValueError, match="16,777,216 .* 1,099,511,627,776"):
        uniform("x", rows=torch.tensor(numbers))
    with pytest.raises(ValueError, match="at most"):
        uniform("x", rows=rows(0), shape=(ROW + 1,))


def test_uniform_numbers_are_uniform():
    u = uniform("u", rows=torch.arange(96), shape=(500,))
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert torch.equal(u * 2**24, (u * 2**24).round())
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 0.01
    assert stats.kstest(uniform("u", rows=torch.arange(48_000)).numpy(), "uniform").pvalue > 0.01, "first of each row"


def test_normal_numbers_are_standard_normal():
    z = normal("z", rows=torch.arange(200), shape=(5000,))
    flat = z.flatten().double()
    assert stats.kstest(flat.numpy(), "norm").pvalue > 0.01
    assert stats.kstest(normal("z", rows=torch.arange(100_000)).numpy(), "norm").pvalue > 0.01
    moments = [flat.pow(k).mean().item() for k in range(1, 7)]
    errors = [math.sqrt(math.prod(range(1, 2 * k, 2)) / 10**6) for k in range(1, 7)]
    assert all(abs(m - w) < 4 * e for m, w, e in zip(moments, (0, 1, 0, 3, 0, 15), errors, strict=True)), moments
    assert 4.5 < z.abs().max() < 6.8
    assert (flat.abs() > 4).double().mean().item() == pytest.approx(6.33e-5, abs=4e-5)


def test_neighbours_are_independent():
    """Numbers of a row, halves of an output, rows, keys; standard errors of 1e-3."""
    z = normal("z", 5, rows=torch.arange(1000), shape=(1000,))
    next_key = normal("z", 6, rows=torch.arange(1000), shape=(1000,))
    half = 500
    pairs = {
        "numbers": (z[:, :-1], z[:, 1:]),
        "cosine and sine": (z[:, :half], z[:, half:]),
        "rows": (z[:-1], z[1:]),
        "keys": (z, next_key),
    }
    for name, (one, other) in pairs.items():
        for power in (1, 2):
            both = torch.stack([one.flatten(), other.flatten()]).double() ** power
            assert torch.corrcoef(both)[0, 1].abs() < 4.5e-3, (name, power)


def test_a_generator_is_a_function_of_its_key():
    one, again = (torch.randperm(50, generator=generator("order", 3, 1)) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, torch.randperm(50, generator=generator("order", 3, 2)))
    assert generator("order", 3, 1).initial_seed() == 13609099910967731296, "orders of resumed runs stay as they were"
