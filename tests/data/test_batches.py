"""Batches are a function of (seed, step), whatever the number of ranks and wherever one starts."""

from functools import partial

import pytest
import torch
from refusals import raises_user_error

from uvit_decay.data import Digits
from uvit_decay.data.batches import InMemory, StepLoader, StepSampler, micro_batches, mirror_half
from uvit_decay.runtime.random import subset


def numbers(n):
    """Return images that show their own number."""
    return InMemory(torch.arange(n, dtype=torch.uint8).reshape(n, 1, 1, 1), torch.arange(n))


def batches(start=0, epochs=1):
    loader = StepLoader(numbers(50), StepSampler(50, 12, 0, 0, 1, shuffle=True))
    loader.load_state_dict({"start": start})
    return [batch for _ in range(epochs) for batch in loader]


def test_an_epoch_shows_each_image_at_most_once_and_epochs_differ():
    first, second = batches(epochs=2)[:4], batches(epochs=2)[4:]
    seen = torch.cat([batch.labels for batch in first])
    assert len(seen) == 48
    assert len(seen.unique()) == 48
    assert not torch.equal(seen, torch.cat([batch.labels for batch in second]))
    assert [batch.number for batch in first + second] == list(range(8))


def test_a_limit_that_does_not_divide_an_epoch_shortens_no_iteration():
    sampler = StepSampler(50, 12, 0, 0, 1, shuffle=True)
    sampler.steps = 3
    loader = StepLoader(numbers(50), sampler)
    iterations = [list(loader) for _ in range(3)]
    assert [[batch.number for batch in found] for found in iterations] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    unlimited = batches(epochs=3)
    for batch in sum(iterations, []):
        assert torch.equal(batch.labels, unlimited[batch.number].labels)


@pytest.mark.parametrize("start", [1, 4, 9])
def test_a_loader_goes_on_where_it_was(start):
    whole, rest = batches(epochs=3), batches(start=start, epochs=3)
    for a, b in zip(whole[start:], rest, strict=False):
        assert torch.equal(a.labels, b.labels)
        assert a.number == b.number


@pytest.mark.parametrize(
    ("share", "limit", "count"),
    [(128, None, 1), (128, 128, 1), (128, 1000, 1), (128, 127, 2), (128, 64, 2), (12, 5, 3), (7, 3, 7), (1, 1, 1)],
)
def test_a_share_is_cut_into_the_fewest_equal_pieces_that_fit(share, limit, count):
    assert micro_batches(share, limit) == count


@pytest.mark.parametrize(("ranks", "limit"), [(1, 3), (2, 3), (2, None), (3, None), (4, None)])
def test_shares_of_ranks_and_their_pieces_make_up_the_global_batch(ranks, limit):
    whole, share = batches(), 12 // ranks
    size = limit or share
    for rank in range(ranks):
        loader = StepLoader(numbers(50), StepSampler(50, 12, 0, rank, ranks, shuffle=True, limit=limit))
        parts, count = list(loader), share // size
        assert len(loader) == len(parts) == 4 * count
        for k, batch in enumerate(whole):
            pieces = parts[k * count : (k + 1) * count]
            labels = torch.cat([part.labels for part in pieces])
            assert torch.equal(labels, batch.labels[rank * share : (rank + 1) * share])
            assert {(part.number, part.total) for part in pieces} == {(k, 12)}
            assert [part.first for part in pieces] == [share * rank + size * i for i in range(count)]


def test_the_state_of_pieces_counts_whole_batches():
    loader = StepLoader(numbers(50), StepSampler(50, 12, 0, 0, 1, shuffle=True, limit=4))
    starts = [loader.state_dict()["start"] for _ in loader]
    assert starts == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_no_index_is_no_image():
    images, labels = InMemory(torch.zeros(9, 3, 4, 4, dtype=torch.uint8), torch.arange(9))[[]]
    assert (images.shape, labels.shape) == ((0, 3, 4, 4), (0,))


def test_a_set_on_a_device_is_read_and_mirrored_there():
    dataset = InMemory(torch.empty(9, 3, 4, 4, dtype=torch.uint8, device="meta"), torch.arange(9))
    for images, labels in (dataset[[4, 2]], dataset.mirrored([4, 2], torch.tensor([True, False]))):
        assert (images.device.type, images.shape, images.dtype) == ("meta", (2, 3, 4, 4), torch.uint8)
        assert labels.tolist() == [4, 2]


@pytest.mark.parametrize(("ranks", "limit"), [(1, None), (2, None), (1, 3), (2, 2)])
def test_half_of_the_images_are_mirrored_and_the_same_ones_everywhere(ranks, limit):
    images = InMemory(torch.arange(2, dtype=torch.uint8).expand(480, 1, 1, 2).clone(), torch.zeros(480).long())
    loaders = [
        StepLoader(images, StepSampler(480, 24, 0, rank, ranks, True, limit), augment=partial(mirror_half, 5))
        for rank in range(ranks)
    ]
    mirrored = torch.empty(20, 24, dtype=torch.bool)
    for loader in loaders:
        for batch in loader:
            mirrored[batch.number, batch.first : batch.first + len(batch.images)] = batch.images[:, 0, 0, 0] == 1
    assert 200 < mirrored.sum() < 280
    alone = StepLoader(images, StepSampler(480, 24, 0, 0, 1, True), augment=partial(mirror_half, 5))
    assert torch.equal(mirrored, torch.stack([batch.images[:, 0, 0, 0] == 1 for batch in alone]))


def test_the_state_counts_batches_handed_out_not_batches_prefetched():
    loader = StepLoader(numbers(50), StepSampler(50, 5, 0, 0, 1, shuffle=True), num_workers=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert loader.state_dict() == {"start": 3}


def test_an_evaluation_loader_starts_anew_and_keeps_the_order():
    loader = StepLoader(numbers(50), StepSampler(50, 10, 0, 0, 1, shuffle=False))
    next(iter(loader))
    assert torch.cat([batch.labels for batch in loader]).tolist() == list(range(50))


@pytest.mark.parametrize(
    ("batch_size", "ranks", "limit", "message"),
    [
        (12, 5, None, ("`batch_size`", "5 devices")),
        (51, 1, None, ("`batch_size`", "50 images")),
        (0, 1, None, ("batch of 0", "1 devices")),
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused(batch_size, ranks, limit, message):
    with raises_user_error(message):
        StepSampler(50, batch_size, 0, 0, ranks, shuffle=True, limit=limit)


def test_the_digits_are_all_there():
    digits = Digits()
    digits.setup()
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.train.images.shape == (1437, 1, 8, 8)
    assert digits.train.images.dtype == torch.uint8
    assert int(digits.train.images.max()) == 255
    assert digits.train.labels.dtype == torch.int64
    assert digits.test.labels.bincount().min() >= 34


def test_a_subset_is_fixed_and_shows_every_class_of_a_sorted_set():
    images = InMemory(torch.zeros(1000, 1, 1, 1, dtype=torch.uint8), torch.arange(1000) // 100)
    chosen = subset(images, 200, "probe")
    assert chosen == subset(images, 200, "probe")
    assert len(set(chosen)) == 200
    assert images.labels[chosen].bincount(minlength=10).min() >= 8
    assert subset(images, 1000, "probe") == list(range(1000))


@pytest.mark.parametrize(("ranks", "size"), [(1, 7), (2, 12), (3, 1), (3, 13)])
def test_a_filled_set_holds_every_image_once_among_its_rows(size, ranks):
    """Images that fill the last batch have rows beyond the set, and all ranks have equally many batches."""
    samplers = [StepSampler(size, 6, 0, rank, ranks, shuffle=False, fill=True) for rank in range(ranks)]
    assert {len(sampler) for sampler in samplers} == {-(-size // 6)}
    rows = {}
    for sampler in samplers:
        for indices, number, first, total in sampler:
            rows |= {number * total + first + i: index for i, index in enumerate(indices)}
    assert {row: index for row, index in rows.items() if row < size} == {i: i for i in range(size)}
    assert all(0 <= index < size for index in rows.values())
