"""Images from a real small U-ViT with random weights: what they depend on."""

import dataclasses
import json
from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
import torch
from refusals import raises_user_error
from sampler_cases import NAMES
from small_source import LABELS, NET, SHAPE, few, images, source

from uvit_decay.diffusion import ode
from uvit_decay.diffusion import sampling as generating
from uvit_decay.diffusion.noise_path import Linear
from uvit_decay.diffusion.samplers import SAMPLERS
from uvit_decay.diffusion.sampling import Sampling, generate, generate_uint8
from uvit_decay.diffusion.sde import SDE
from uvit_decay.files.validation import as_type
from uvit_decay.pictures import to_uint8
from uvit_decay.runtime.random import normal

TOGETHER = [name for name in NAMES if name != "dopri5"]  # which takes one image at a time, and is slow


@pytest.fixture(autouse=True)
def rough(monkeypatch):
    """Let dopri5 take few steps: what is tested here holds for any."""
    monkeypatch.setattr(ode, "RTOL", 0.1)
    monkeypatch.setattr(ode, "ATOL", 0.01)


@pytest.mark.parametrize(("name", "guidance"), [*((name, 1.0) for name in NAMES), ("dpm++", 2.0)])
def test_images_do_not_depend_on_the_batch_size_order_or_neighbours(name, guidance):
    sampling = Sampling(name, steps=3, guidance=guidance)
    count = few(name, 10)
    whole = images(sampling, range(count))
    assert whole.shape == (count, *SHAPE)
    assert whole.dtype == torch.float32
    assert whole.std() > 0.2
    for size in (1, 3):
        parts = images(sampling, range(count), batch_size=size)
        assert torch.allclose(parts, whole, atol=1e-4 * max(1, whole.abs().max().item() / 10))
        assert torch.equal(to_uint8(parts), to_uint8(whole))
    if name in TOGETHER:
        chosen = [7, 2, 9, 0]
        some = images(sampling, chosen, [LABELS[i] for i in chosen], batch_size=3)
        assert torch.allclose(some, whole[chosen], atol=1e-4)
        far = images(sampling, [10**9 + 7], [1])
        assert torch.allclose(far, images(sampling, [3, 10**9 + 7], [0, 1])[1:], atol=1e-4)


@pytest.mark.parametrize("name", TOGETHER)
def test_images_depend_on_seed_index_and_label(name):
    sampling = Sampling(name, steps=4)
    one = images(sampling, [4, 5, 4], [1, 1, 2])
    other_seed = images(sampling, [4], [1], seed=1)
    different = [one[0], one[1], one[2], other_seed[0]]
    for i in range(4):
        for j in range(i):
            assert (different[i] - different[j]).abs().max() > 1e-2, (i, j)
    swapped = images(sampling, [1], [1], seed=4)
    assert (swapped[0] - one[0]).abs().max() > 1e-2, "(seed 0, index 4) is not (seed 4, index 1)"


@pytest.mark.parametrize("name", TOGETHER)
def test_generation_is_deterministic_and_leaves_the_global_stream_alone(name):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first = images(Sampling(name, steps=3))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(images(Sampling(name, steps=3)), first)


@pytest.mark.parametrize("precision", [None, "float32", "bf16"])
def test_the_network_computes_in_the_precision_and_the_sampler_in_float32(precision):
    seen = []

    def net(x, t, y):
        seen.append((x.dtype, torch.nn.functional.linear(x, torch.eye(8)).dtype))
        return NET(x, t, y)

    sampling = Sampling(steps=3, guidance=2.0, precision=precision)
    sampled = images(sampling, of=source(net))
    assert set(seen) == {(torch.float32, torch.bfloat16 if precision == "bf16" else torch.float32)}
    assert sampled.dtype == torch.float32
    exact = images(replace(sampling, precision=None))
    assert torch.equal(sampled, exact) == (precision != "bf16")
    assert (sampled - exact).abs().mean() < 0.05
    assert sampling.name == "dpm++3_w2" + ("_bf16" if precision == "bf16" else "")
    assert source().in_precision(sampling).metadata()["precision"] == (precision or "float32")


@pytest.mark.parametrize(("precision", "expected"), [(None, "ieee"), ("float32", "ieee"), ("bf16", "tf32")])
def test_what_finishes_samples_is_exact_where_the_network_is_and_never_in_bfloat16(precision, expected):
    seen = []

    def decode(x):
        seen.append((torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision))
        assert torch.nn.functional.linear(x, torch.eye(8)).dtype == torch.float32
        return to_uint8(x)

    with torch.autocast("cpu", torch.bfloat16):
        actual = generate_uint8(source(), Sampling(steps=2, precision=precision), [3, 1], [0, 1], 0, decode)
    assert seen == [(expected, expected)]
    assert torch.equal(actual, to_uint8(images(Sampling(steps=2, precision=precision), [3, 1], [0, 1])))


def test_tf32_is_the_default_of_gpus_and_refused_elsewhere():
    gpu = source(device=torch.device("cuda"))
    assert gpu.in_precision(Sampling()).name == "dpm++25_w1_tf32"
    assert gpu.in_precision(Sampling(precision="float32")).name == "dpm++25_w1"
    assert source().in_precision(Sampling()).precision == "float32"
    for refused in (source().in_precision, lambda sampling: images(sampling, [0], [0])):
        with raises_user_error("tf32", "CUDA", "cpu"):
            refused(Sampling(precision="tf32"))


def test_each_step_of_each_seed_has_noise_of_its_own(monkeypatch):
    drawn = []
    monkeypatch.setattr(generating, "normal", lambda *key, **place: drawn.append(normal(*key, **place)) or drawn[-1])
    for seed in (0, 1):
        images(Sampling("ddpm", steps=3), [0, 1], [0, 1], seed=seed)
    assert len(drawn) == 2 * 3, "the start and two noisy steps"
    assert len(torch.stack(drawn).flatten().unique()) > 0.99 * torch.stack(drawn).numel()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(sampler="plms"), ("sampler", *SAMPLERS, "'plms'")),
        (dict(steps=0), ("dpm++", 1, 1000, 0)),
        (dict(steps=1001), ("dpm++", 1, 1000, 1001)),
        (dict(guidance_interval=(0.8, 0.2)), ("guidance_interval", "0.8,0.2")),
        (dict(guidance_interval=(0.2, 1.2)), ("guidance_interval", "0.2,1.2")),
        (dict(sde=SDE()), ("dpm++", "sde", "sit-sde")),
    ],
)
def test_sampling_out_of_range_is_a_user_error(options, reason):
    with raises_user_error(reason):
        Sampling(**options)


def test_sampling_describes_itself():
    assert Sampling().name == "dpm++25_w1"
    assert Sampling("heun", 18, 1.25).name == "heun18_w1.25"
    assert (Sampling("dopri5").name, Sampling("dopri5").nfe) == ("dopri5_w1", None)
    assert (Sampling("sit-ode").name, Sampling("sit-ode").nfe) == ("sit-ode125_w1", 250)
    assert (Sampling("sit-sde", 10).name, Sampling("sit-sde").nfe) == ("sit-sde10_w1", 250)
    assert [Sampling(name).num_steps for name in ("heun", "uvit-dpm")] == [25, 50]
    long = Sampling("sit-sde", None, 2.0, None, 3, (0.1, 0.7), SDE("linear", heun=True))
    assert long.name == "sit-sde250_w2_first3_t0.1-0.7_linear1-mean0.04-heun"
    assert Sampling("uvit-em", clip=False).name == Sampling("uvit-em").name == "uvit-em1000_w1"
    assert Sampling("uvit-em", clip=True).name == "uvit-em1000_w1_clip"


BASE = Sampling("sit-sde", 3, 2.0, sde=SDE())
OTHERS = {  # fields of Sampling and of SDE, and other values
    "sampler": ["uvit-em"],
    "steps": [4],
    "guidance": [2.00000012, 3.0],  # the first in float32 is next to 2
    "clip": [True, False],
    "guidance_channels": [1],
    "guidance_interval": [(0.5, 1.0), (0.50000012, 1.0), (0.0, 0.5)],
    "precision": ["bf16"],
    "sde": [None],
    "form": ["constant", "sbdm"],
    "norm": [1.00000012],
    "last_step": ["tweedie", "euler", "none"],
    "last_time": [0.04000012],
    "heun": [True],
}


@pytest.mark.parametrize("pixels", [True, False])
def test_samplings_that_make_other_images_have_other_names(pixels):
    assert set(OTHERS) == {field.name for kind in (Sampling, SDE) for field in dataclasses.fields(kind)}
    of_sde = {field.name for field in dataclasses.fields(SDE)}
    samplings = [BASE]
    for name, values in OTHERS.items():
        for value in values:
            change = {"sde": replace(BASE.sde, **{name: value})} if name in of_sde else {name: value}
            samplings.append(replace(BASE, **change))
    samplings += [Sampling(name, 3, clip=clip) for name in ("dpm++", "uvit-em") for clip in (None, True, False)]
    named = {}
    for sampling in samplings:
        sampled = images(sampling, [0, 1], [0, 1], of=source(pixels=pixels))
        assert torch.equal(named.setdefault(sampling.name, sampled), sampled), sampling
    distinct = {sampled.numpy().tobytes() for sampled in named.values()}
    assert len(distinct) >= len(samplings) - 6, "the changes are seen"


@pytest.mark.parametrize(
    ("name", "expected"), [("dpm++", True), ("ddim", True), ("uvit-em", False), ("sit-ode", False)]
)
def test_only_pixels_are_clipped_and_never_as_the_papers_sample(name, expected):
    assert source().clips(Sampling(name)) is expected
    assert not source().clips(Sampling("sit-sde", sde=SDE("linear"))), "whatever is integrated"
    assert not source(pixels=False).clips(Sampling(name))
    for clip in (True, False):
        assert (
            source().clips(Sampling(name, clip=clip)) is source(pixels=False).clips(Sampling(name, clip=clip)) is clip
        )


def test_steps_do_not_name_an_adaptive_sampler_whose_images_they_do_not_change():
    few, many = (images(Sampling("dopri5", steps), [0], [0]) for steps in (1, 7))
    assert torch.equal(few, many)


def test_a_sampler_that_is_not_sound_on_the_path_is_a_user_error():
    of = source(prediction="velocity", path=Linear())
    with raises_user_error("log-SNR", "t = 1", "Linear", "sampler"):
        images(Sampling("uvit-dpm", 3), [0], [1], of=of)
    with raises_user_error("t = 1", "Linear"):
        of.check(Sampling("sit-sde", sde=SDE("sbdm")))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling("dpm++", 50, 1.4),
        Sampling("sit-sde", None, 2.0, None, 3, (0.1, 0.7), SDE("linear", 0.5, "tweedie", 0.02, True)),
    ],
)
def test_sampling_is_built_again_from_a_checkpoint_s_description(sampling):
    stored = dataclasses.asdict(sampling)
    assert as_type(Sampling, stored, "it") == sampling
    assert as_type(Sampling, json.loads(json.dumps(stored)), "it") == sampling
    old = {key: stored[key] for key in ("sampler", "steps", "guidance", "clip")}
    assert as_type(Sampling, old, "it").sde is None, "files that do not know the newer fields load"
    assert Sampling(**old).guidance_channels is None


@pytest.mark.parametrize(
    ("name", "indices", "labels", "seed"),
    [
        ("labels[1]", [0, 1], [0, 1.5], 0),
        ("labels[0]", [0, 1], torch.tensor([9, 0]), 0),
        ("labels", [0, 1], [0], 0),
        ("indices[1]", [0, -1], [0, 1], 0),
        ("seed", [0], [0], -1),
    ],
)
def test_labels_indices_and_seeds_that_cannot_be_are_refused(name, indices, labels, seed, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # whose checks of types would come first
    with raises_user_error(name):
        generate(source(), Sampling(steps=1), indices, labels, seed)


def test_labels_and_indices_may_be_tensors_and_arrays():
    expected = generate(source(), Sampling(steps=1), [3, 4], [1, 2], 0)
    found = generate(source(), Sampling(steps=1), np.array([3, 4]), torch.tensor([1, 2]), 0)
    assert torch.equal(found, expected)
    with raises_user_error("labels", "None"):
        generate(source(num_classes=0), Sampling(steps=1), [0], [0], 0)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("channels", [1, 4])
def test_an_output_of_another_shape_makes_no_images(channels, guidance):
    """One channel of two would be broadcast, and of four two would be left out."""

    def net(x, t, y):
        return torch.cat([x, x], dim=1)[:, :channels]

    with raises_user_error((2, 2, 8, 8), (2, channels, 8, 8)):
        images(Sampling("euler", steps=2, guidance=guidance), range(2), of=source(net))
    variance = source(NET, learned_variance=True)
    with raises_user_error((2, 4, 8, 8), (2, 2, 8, 8)):
        images(Sampling("euler", steps=2, guidance=guidance), range(2), of=variance)
