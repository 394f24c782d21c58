"""Images at the borders: the uint8 conversion, grids, files."""

import weakref

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import raises_user_error

from uvit_decay.pictures import grid_columns, labelled_grid, save_npz, save_pngs, to_float, to_pil, to_uint8
from uvit_decay.terminal.errors import UserError

ALL = torch.arange(256, dtype=torch.uint8)
GAP, HEADER = 4, 22


def random_images(n, channels, side, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, channels, side, side), generator=generator, dtype=torch.uint8)


def test_float_images_span_minus_one_to_one_and_are_converted_back():
    x = to_float(ALL)
    assert torch.equal(to_uint8(x), ALL)
    assert torch.equal(to_uint8(x.double()), ALL)
    assert x.dtype == torch.float32
    assert x[0] == -1.0
    assert x[255] == 1.0
    assert torch.allclose(x.diff(), torch.full((255,), 1 / 127.5), atol=1e-6)


def test_conversion_rounds_to_the_nearest_value():
    exact = ALL[1:-1].float()
    for shift in (-0.49, 0.49):
        assert torch.equal(to_uint8((exact + shift) / 127.5 - 1), ALL[1:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_out_of_range_are_clamped(dtype):
    assert to_uint8(torch.tensor([1.01, -1.01, 7.0, -1e30, 1e30], dtype=dtype)).tolist() == [255, 0, 255, 0, 255]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused(value):
    with raises_user_error("NaN"):
        to_uint8(torch.tensor([0.0, value]))


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pil_images_hold_the_same_pixels(channels, mode):
    image = random_images(1, channels, 5)[0, :, :4]  # not square: height 4, width 5
    shown = to_pil(image)
    assert (shown.mode, shown.size) == (mode, (5, 4))
    array = np.asarray(shown).reshape(4, 5, channels)
    assert np.array_equal(array, image.permute(1, 2, 0).numpy())


@pytest.mark.parametrize(
    ("channels", "n", "columns", "rows", "cell", "scale", "named"),
    [(1, 6, 3, 2, 64, 8, False), (3, 7, 3, 3, 17, 2, True), (3, 2, 5, 1, 8, 1, False), (1, 1, 1, 1, 3, 1, True)],
)
def test_a_grid_holds_the_right_pixels_at_the_right_places(channels, n, columns, rows, cell, scale, named):
    images = random_images(n, channels, 8)
    names = [str(i) for i in range(columns)] if named else ()
    grid = np.asarray(labelled_grid(images, columns, names, cell)).copy()
    side, top = 8 * scale, HEADER if named else 0
    assert grid.shape == (top + rows * (side + GAP) + GAP, columns * (side + GAP) + GAP, 3)
    for i, image in enumerate(images):
        y, x = top + GAP + i // columns * (side + GAP), GAP + i % columns * (side + GAP)
        wanted = image.expand(3, -1, -1).permute(1, 2, 0).numpy().repeat(scale, 0).repeat(scale, 1)
        assert np.array_equal(grid[y : y + side, x : x + side], wanted), i
        grid[y : y + side, x : x + side] = 255
    assert (grid[top:] == 255).all(), "gaps and empty cells are white"


def test_names_stand_above_their_columns_and_surplus_ones_are_left_out():
    images = random_images(8, 1, 8)
    grid = np.asarray(labelled_grid(images, 4, ["cat", "", "a name far too long for its column", "dog", "extra"]))
    ink = (grid[:HEADER] < 128).any(axis=(0, 2))
    ends = [GAP + column * (64 + GAP) for column in range(5)]
    inked = [ink[a : b - GAP].any() for a, b in zip(ends[:-1], ends[1:], strict=True)]
    assert inked == [True, False, True, True]
    gaps = [ink[a - GAP : a] for a in ends]
    assert not np.concatenate(gaps).any(), "names are as wide as their columns at most"


@pytest.mark.parametrize(
    ("classes", "wanted", "columns"),
    [(0, 10, 10), (0, 3, 3), (10, 10, 10), (3, 10, 9), (4, 10, 8), (1, 10, 10), (100, 10, 100), (7, 10, 7), (2, 5, 4)],
)
def test_a_grid_has_whole_turns_of_classes(classes, wanted, columns):
    assert grid_columns(classes, wanted) == columns


@pytest.mark.parametrize(("channels", "labels"), [(1, None), (3, [*range(40)])])
def test_an_npz_is_read_as_savez_wrote_it_and_needs_a_batch_of_memory(tmp_path, channels, labels):
    """The layout of the evaluation suite: uint8 (n, h, w, c), then the labels."""
    images, alive = random_images(40, channels, 8)[:, :, :6], []

    def batches():
        for i in range(0, 40, 2):
            batch = images[i : i + 2].clone()
            alive.append(weakref.ref(batch))
            yield batch
            assert sum(ref() is not None for ref in alive) <= 3

    save_npz(tmp_path / "ours.npz", batches(), 40, labels)
    arrays = [images.permute(0, 2, 3, 1).numpy(), *([np.array(labels)] if labels else [])]
    np.savez(tmp_path / "theirs.npz", *arrays)
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "theirs.npz").read_bytes()


def test_an_npz_is_whole_or_not_there(tmp_path):
    def stops():
        yield random_images(2, 1, 8)
        raise UserError("stopped")

    for batches, error in ((stops(), UserError), ([random_images(2, 1, 8)], ValueError)):
        with pytest.raises(error):
            save_npz(tmp_path / "samples.npz", batches, 4)
        assert not (tmp_path / "samples.npz").exists()


@pytest.mark.parametrize(("channels", "numbers"), [(1, None), (3, [7, 3, 5, 12])])
def test_pngs_are_numbered_and_lossless_and_a_batch_is_whole_when_the_next_one_fails(tmp_path, channels, numbers):
    images = random_images(4, channels, 8)

    def stops():
        yield from images.split(2)
        raise UserError("stopped")

    with raises_user_error("stopped"):
        save_pngs(tmp_path, stops(), *filter(None, [numbers]))
    names = [f"{number:06d}.png" for number in numbers or range(4)]
    assert {path.name for path in tmp_path.iterdir()} == {*names}
    for name, image in zip(names, images, strict=True):
        read = torch.from_numpy(np.asarray(Image.open(tmp_path / name)).copy()).reshape(8, 8, channels)
        assert torch.equal(read.permute(2, 0, 1), image)
    with raises_user_error("000000.png", "No such file"):
        save_pngs(tmp_path / "gone", [images])
