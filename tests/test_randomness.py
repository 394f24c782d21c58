"""Streams are functions of their keys, and the ranks of a global batch draw what one process would draw."""

import itertools

import pytest
import torch

from uvit_decay.randomness import SHARDS, BatchRandom, generator

TOTALS = (30, 32, 96, 7)
KEYS = [("noise", 0, 0), ("noise", 0, 1), ("noise", 1, 0), ("noise", 1, 1), ("noise", 10**6, 3), ("times", 0, 0)]


def numbers(*key):
    return torch.rand(8, generator=generator(*key))


def bounds(total, ranks):
    """(first, count) of each rank, as even as can be."""
    edges = [total * rank // ranks for rank in range(ranks + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


def layouts(total):
    """Even cuts for 1 to 5 ranks, and crooked ones."""
    even = [bounds(total, ranks) for ranks in (1, 2, 3, 4, 5)]
    return [*even, [(0, 1), (1, total - 1)], [(0, total - 1), (total - 1, 1)], [(i, 1) for i in range(total)]]


def draws(key, first, count, total):
    """Four successive draws of different kinds and shapes."""
    random = BatchRandom(*key, first=first, count=count, total=total)
    return random.normal(1, 2, 3), random.uniform(), random.normal(5), random.uniform(2)


@pytest.mark.parametrize("key", KEYS)
def test_the_same_key_is_the_same_stream(key):
    assert torch.equal(numbers(*key), numbers(*key))


def test_different_keys_are_different_streams():
    streams = [tuple(numbers(*key).tolist()) for key in KEYS]
    assert len(set(streams)) == len(KEYS)


def test_a_generator_leaves_the_global_stream_alone():
    torch.manual_seed(0)
    wanted = torch.rand(4)
    torch.manual_seed(0)
    numbers("noise", 3)
    draws(("noise", 3), 0, 8, 8)
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.parametrize("total", TOTALS)
def test_ranks_together_draw_what_one_process_draws(total):
    whole = draws(("noise", 5, 7), 0, total, total)
    for layout in layouts(total):
        parts = [draws(("noise", 5, 7), first, count, total) for first, count in layout]
        for one, many in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(many), one), layout


@pytest.mark.parametrize("total", TOTALS)
def test_no_two_positions_or_draws_share_their_numbers(total):
    random = BatchRandom("noise", 0, first=0, count=total, total=total)
    rows = torch.cat([random.normal(4) for _ in range(3)])
    assert len(rows.unique(dim=0)) == 3 * total


@pytest.mark.parametrize("total", TOTALS)
def test_a_batch_has_at_most_sixteen_streams(total):
    random = BatchRandom("noise", first=0, count=total, total=total)
    assert len(random.generators) <= SHARDS == 16
    assert len(random.generators) * random.size == total


@pytest.mark.parametrize("total", TOTALS)
def test_another_key_draws_other_numbers(total):
    for one, other in zip(draws(("noise", 0), 0, total, total), draws(("noise", 1), 0, total, total), strict=True):
        assert not (one == other).any()


def test_uniform_numbers_are_uniform():
    u = BatchRandom("u", first=0, count=96, total=96).uniform(500)
    assert u.dtype == torch.float32
    assert u.shape == (96, 500)
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 10, 0, 1) / u.numel()
    assert (counts - 0.1).abs().max() < 0.006  # 4.4 standard errors
    assert u.mean().item() == pytest.approx(0.5, abs=0.006)


def test_normal_numbers_are_standard_normal_and_independent():
    z = BatchRandom("z", first=0, count=96, total=96).normal(500)
    assert z.dtype == torch.float32
    assert z.shape == (96, 500)
    assert z.mean().item() == pytest.approx(0, abs=0.02)
    assert z.std().item() == pytest.approx(1, abs=0.015)
    assert (z.abs() < 1).float().mean().item() == pytest.approx(0.6827, abs=0.01)
    correlations = torch.corrcoef(z) - torch.eye(96)
    assert correlations.abs().max() < 0.25  # 5.6 standard errors, over 4560 pairs


def test_trailing_zeros_of_a_key_count():
    draws = [torch.rand(1, generator=generator(*key)).item() for key in (("a",), ("a", 0), ("a", 0, 0))]
    assert len(set(draws)) == 3
