"""Patches and their inverse against naive loops; the time embedding against its formula."""

import math

import pytest
import torch

from uvit_decay.nn.embed import PatchEmbed, timestep_embedding, unpatchify


def naive_tokens(image, patch):
    """Return one token a patch, row by row; values ordered (row, column, channel)."""
    count, channels, side, _ = image.shape
    tokens = torch.empty(count, (side // patch) ** 2, patch * patch * channels)
    for b in range(count):
        for row in range(side):
            for column in range(side):
                token = (row // patch) * (side // patch) + column // patch
                start = ((row % patch) * patch + column % patch) * channels
                tokens[b, token, start : start + channels] = image[b, :, row, column]
    return tokens


def formula(times, dim):
    """cos and sin of t * 10000^(-i / half), each number by itself in float64."""
    half = dim // 2
    rows = []
    for t in times:
        angles = [t * 1e4 ** (-i / half) for i in range(half)]
        rows.append([*map(math.cos, angles), *map(math.sin, angles), *[0.0] * (dim % 2)])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("side", "patch", "channels"), [(8, 2, 3), (8, 4, 1), (6, 3, 4), (4, 1, 3), (4, 4, 3)])
def test_patches_are_in_row_major_order_embedded_by_a_linear_map_and_put_back(side, patch, channels):
    torch.manual_seed(0)
    embed, image = PatchEmbed(side, patch, channels, 5), torch.randn(2, channels, side, side)
    patches, weight = naive_tokens(image, patch), naive_tokens(embed.proj.weight, patch)[:, 0]
    tokens = embed(image)
    assert tokens.shape == (2, embed.tokens, 5)
    torch.testing.assert_close(tokens, patches @ weight.T + embed.proj.bias)
    assert torch.equal(unpatchify(patches, channels), image)


@pytest.mark.parametrize(("times", "atol"), [((0.0, 0.25, 1.0, 7.5), 3e-6), ((100.0, 499.5, 998.0, 1000.0), 3e-4)])
@pytest.mark.parametrize("dim", [2, 8, 9, 64, 65, 512])
def test_timestep_embedding_is_the_formula_with_cosines_first_and_odd_widths_padded(dim, times, atol):
    t = torch.tensor(times)
    embedding = timestep_embedding(t, dim)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(timestep_embedding(t, dim), embedding)
    assert torch.equal(timestep_embedding(t.double(), dim), embedding)
    assert embedding.shape == (4, dim)
    assert embedding.dtype == torch.float32
    torch.testing.assert_close(embedding.double(), formula(times, dim), atol=atol, rtol=0)
