"""The schedules of decayed shortcuts: every number that the paper and the authors' code print."""

import math
import re
from itertools import pairwise

import jaxtyping
import pytest
from refusals import raises_user_error
from torch import nn

from uvit_decay.decay import alpha_min_for, attach, effective_decay, shortcuts

ALPHA_MINS = (0.5, 0.6, 0.7, 0.8, 0.9)

EFFECTIVE = {  # blocks: (product of all branches, product without the last block) for each of ALPHA_MINS
    12: ["6.08e-4 / 2.33e-3", "3.58e-3 / 9.66e-3", ".0176 / .0354", ".0756 / .117", ".288 / .354"],
    18: ["1.53e-5 / 5.95e-5", "2.17e-4 / 5.90e-4", "2.36e-3 / 4.75e-3", ".0208 / .0323", ".155 / .191"],
    24: ["3.85e-7 / 1.51e-6", "1.31e-5 / 3.59e-5", "3.15e-4 / 6.37e-4", "5.74e-3 / 8.92e-3", ".0833 / .103"],
    28: ["3.3e-8 / 1.3e-7", "2.02e-6 / 5.5e-6", "8.23e-5 / 1.67e-4", "2.43e-3 / 3.78e-3", ".0551 / .0678"],
    13: ["3.29e-4 / 1.27e-3", "2.24e-3 / 6.07e-3", ".0126 / .0253", ".0610 / .0943", ".260 / .320"],
    17: ["2.83e-5 / 1.10e-4", "3.46e-4 / 9.41e-4", "3.30e-3 / 6.64e-3", ".0258 / .0400", ".172 / .212"],
    21: ["2.4e-6 / 9.5e-6", "5.33e-5 / 1.46e-4", "8.62e-4 / 1.74e-3", ".0109 / .0170", ".114 / .140"],
    29: ["1.8e-8 / 7e-8", "1.27e-6 / 3.5e-6", "5.88e-5 / 1.19e-4", "1.96e-3 / 3.05e-3", ".0497 / .0612"],
}
EFFECTIVE_CELLS = [
    (blocks, alpha_min, *cell.split(" / "))
    for blocks, row in EFFECTIVE.items()
    for alpha_min, cell in zip(ALPHA_MINS, row, strict=True)
]
PER_LAYER_V2 = [
    (blocks, alpha_min, printed)
    for blocks, row in {
        12: (".0468", ".112", ".246", ".510"),
        18: (".0115", ".0408", ".129", ".374"),
        24: (".00283", ".0149", ".0679", ".274"),
    }.items()
    for alpha_min, printed in zip(ALPHA_MINS[1:], row, strict=True)
]
SCHEDULES = ("linear", "cosine", "learnable")


def rounded(value, printed):
    """Return `value` rounded to as many significant digits as the string `printed` shows."""
    digits = re.sub(r"e.*|\.", "", printed).lstrip("0")
    return float(f"{value:.{len(digits) - 1}e}")


@pytest.mark.parametrize(
    ("blocks", "alpha_min", "step", "printed", "left"),
    [
        (12, 0.6, 0.4 / 23, {0: 1.0, 1: 0.982609, 2: 0.965217, 22: 0.617391, 23: 0.6}, ".00358"),
        (28, 0.8, 0.2 / 55, {0: 1.0, 27: 0.901818, 28: 0.898182, 55: 0.8}, ".00242951"),  # SiT-XL
        (13, 0.7, 0.012, {0: 1.0, 25: 0.7}, ".0126168"),  # U-ViT-S
    ],
)
def test_linear_schedules_match_the_printed_numbers(blocks, alpha_min, step, printed, left):
    alphas = shortcuts(blocks, alpha_min).alphas
    assert len(alphas) == 2 * blocks
    assert {k: round(alphas[k], 6) for k in printed} == printed
    assert all(a - b == pytest.approx(step, rel=1e-12) for a, b in pairwise(alphas))
    assert rounded(effective_decay(alphas), left) == float(left)
    assert blocks != 28 or rounded(effective_decay(alphas[:28]), ".241038") == 0.241038


@pytest.mark.parametrize(("blocks", "alpha_min", "all_branches", "without_last_block"), EFFECTIVE_CELLS)
def test_effective_decay_matches_the_table(blocks, alpha_min, all_branches, without_last_block):
    alphas = shortcuts(blocks, alpha_min).alphas
    assert rounded(effective_decay(alphas), all_branches) == float(all_branches)
    assert rounded(effective_decay(alphas, exclude_last_block=True), without_last_block) == float(without_last_block)


@pytest.mark.parametrize(("blocks", "alpha_min", "printed"), PER_LAYER_V2)
def test_per_layer_v2_count_is_the_block_schedule_taken_once_a_block(blocks, alpha_min, printed):
    alphas = shortcuts(blocks, alpha_min, granularity="block", index="v2").alphas
    assert rounded(effective_decay(alphas[::2]), printed) == float(printed)


@pytest.mark.parametrize(
    ("blocks", "alpha_min", "printed"),
    [
        (12, 0.6, "3.16e-3"),
        (12, 0.7, "1.66e-2"),
        (18, 0.6, "1.79e-4"),
        (18, 0.7, "2.15e-3"),
        (24, 0.6, "1.02e-5"),
        (24, 0.7, "2.78e-4"),
    ],
)
def test_effective_decay_of_cosine_matches_the_table(blocks, alpha_min, printed):
    alphas = shortcuts(blocks, alpha_min, schedule="cosine").alphas
    assert rounded(effective_decay(alphas), printed) == float(printed)


@pytest.mark.parametrize(("branches", "silent", "printed"), [("attention", 1, ".0684"), ("mlp", 0, ".0523")])
def test_one_kind_of_branch_keeps_its_schedule_and_the_other_keeps_one(branches, silent, printed):
    both, alphas = shortcuts(12, 0.6).alphas, shortcuts(12, 0.6, branches=branches).alphas
    assert alphas[silent::2] == (1.0,) * 12
    assert alphas[1 - silent :: 2] == both[1 - silent :: 2]
    assert rounded(effective_decay(alphas), printed) == float(printed)


@pytest.mark.parametrize("blocks", [1, 2, 13, 28])
@pytest.mark.parametrize("alpha_min", ALPHA_MINS)
@pytest.mark.parametrize("granularity", ["branch", "block"])
@pytest.mark.parametrize(("index", "first", "last"), [("code", 0, None), ("v2", 1, 0), ("v1", 0, 1)])
def test_index_conventions_differ_in_their_first_and_last_alpha(blocks, alpha_min, granularity, index, first, last):
    steps = 2 * blocks if granularity == "branch" else blocks
    alphas = shortcuts(blocks, alpha_min, granularity=granularity, index=index).alphas
    if index == "code" and steps > 1:
        assert (alphas[0], alphas[-1]) == (1.0, alpha_min)
    if index != "code":
        assert alphas[0] == pytest.approx(1 - (1 - alpha_min) * first / steps, rel=1e-12)
        assert alphas[-1] == pytest.approx(1 - (1 - alpha_min) * (steps - last) / steps, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("index", ["code", "v2", "v1"])
@pytest.mark.parametrize("granularity", ["branch", "block"])
def test_every_schedule_falls_and_stays_between_alpha_min_and_one(schedule, index, granularity):
    alphas = shortcuts(9, 0.3, schedule, granularity, index).alphas
    assert len(alphas) == 18
    assert all(a >= b for a, b in pairwise(alphas))
    assert alphas[0] > alphas[-1]
    assert all(0.3 - 1e-12 <= alpha <= 1.0 for alpha in alphas)
    assert (alphas[0::2] == alphas[1::2]) == (granularity == "block")


@pytest.mark.parametrize("index", ["code", "v2", "v1"])
@pytest.mark.parametrize(
    ("schedule", "branches"),
    [*((schedule, "both") for schedule in SCHEDULES), *(("linear", kind) for kind in ("attention", "mlp"))],
)
def test_alpha_min_one_is_exactly_the_ordinary_network(schedule, index, branches):
    result = shortcuts(13, 1.0, schedule, index=index, branches=branches)
    assert result.alphas == result.betas == (1.0,) * 26
    assert effective_decay(result.alphas) == 1.0


@pytest.mark.parametrize(
    ("blocks", "exclude"), [(2, False), (12, False), (28, False), (12, True), (13, True), (28, True)]
)
@pytest.mark.parametrize("target", [1e-5, 1e-3, 5e-3, 0.3, 1.0])
def test_alpha_min_for_inverts_effective_decay(target, blocks, exclude):
    alpha_min = alpha_min_for(target, 2 * blocks, exclude_last_block=exclude)
    assert 0.0 < alpha_min <= 1.0
    assert effective_decay(shortcuts(blocks, alpha_min).alphas, exclude) == pytest.approx(target, rel=1e-6)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        *((shortcuts, (12, alpha_min), "alpha_min") for alpha_min in (0.0, -0.1, 1.0 + 1e-9, math.nan)),
        *((shortcuts, (blocks, 0.7), "blocks") for blocks in (0, -3)),
        *((alpha_min_for, (1e-3, branches), "branches") for branches in (-2, 0, 1, 23, 25)),
        *((alpha_min_for, (target, 24), "target") for target in (0.0, -1e-3, 1.5, math.nan)),
        *(
            (alpha_min_for, arguments, "no alpha_min reaches")
            for arguments in ((1e-13, 2), (0.5, 4, True), (1e-300, 24))
        ),
    ],
)
def test_numbers_that_cannot_be_are_user_errors(function, arguments, message):
    with raises_user_error(message):
        function(*arguments)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("index", ["code", "v1", "v2"])
def test_one_branch_a_block_is_every_second_count_of_two(schedule, index):
    """L blocks of one branch have the alphas of L / 2 blocks of two; of an odd L, those of their depths."""
    single = shortcuts(8, 0.6, schedule, index=index, per_block=1)
    assert single == shortcuts(4, 0.6, schedule, index=index)
    u = {"code": [0, 0.5, 1], "v1": [0, 1 / 3, 2 / 3], "v2": [1 / 3, 2 / 3, 1]}[index]
    if schedule != "cosine":
        expected = [1 - 0.4 * depth for depth in u]
        assert shortcuts(3, 0.6, schedule, index=index, per_block=1).alphas == pytest.approx(expected)


@pytest.mark.parametrize(
    "options", [{"schedule": "cosin"}, {"branches": "attn"}, {"index": "V2"}, {"granularity": "layer"}, {"index": None}]
)
@pytest.mark.parametrize(
    "build",
    [
        lambda **options: shortcuts(6, 0.7, **options),
        lambda **options: attach(nn.TransformerEncoderLayer(8, 2, 8, norm_first=True), 0.7, **options),
    ],
    ids=["shortcuts", "attach"],
)
def test_an_unknown_word_is_a_user_error_that_names_the_known_ones(build, options, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks of types would come first
    ((name, word),) = options.items()
    with raises_user_error(name, repr(word)):
        build(**options)
