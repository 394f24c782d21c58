"""Images from a real small U-ViT with random weights: what they depend on, and guidance as a wrapper."""

from dataclasses import replace

import pytest
import torch

from uvit_decay.diffusion.generate import Sampling, Source, denoiser, generate
from uvit_decay.diffusion.guidance import Guided
from uvit_decay.diffusion.path import VP
from uvit_decay.diffusion.sampler import SAMPLERS
from uvit_decay.errors import UserError
from uvit_decay.image import to_uint8
from uvit_decay.nn import UViT

CLASSES, SHAPE = 3, (2, 8, 8)
LABELS = [0, 1, 2, 2, 1, 0, CLASSES, 1, 2, 0]
PATH = VP()


def network(**options):
    """A U-ViT whose random output depends strongly on the picture, the time and the label."""
    torch.manual_seed(0)
    sizes = dict(image_size=8, patch_size=4, channels=2, dim=32, depth=2, heads=2, num_classes=CLASSES)
    return UViT(**sizes | dict(alpha_min=0.7, zero_init=False, init="xavier") | options).eval().requires_grad_(False)


NET = network()


def source(net=NET, prediction="eps", **changes):
    given = dict(shape=SHAPE, num_classes=CLASSES, null_label=True, device=torch.device("cpu"))
    return Source(net, PATH, prediction, **given | changes)


def images(sampling, indices=range(10), labels=LABELS, seed=0, batch_size=10, of=None):
    return torch.cat(list(generate(of or source(), sampling, indices, labels, seed, batch_size)))


def noise(n=5, seed=0):
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(seed))


def times(*values):
    return torch.tensor(values)


T, Y = times(1.0, 0.8, 0.5, 0.1, 0.001), torch.tensor([0, 1, 2, CLASSES, 1])


@pytest.mark.parametrize(("name", "guidance"), [*((name, 1.0) for name in SAMPLERS), ("dpm++", 2.0)])
def test_images_do_not_depend_on_the_batch_size(name, guidance):
    sampling = Sampling(name, steps=3, guidance=guidance)
    whole = images(sampling)
    assert whole.shape == (10, *SHAPE)
    assert whole.dtype == torch.float32
    assert whole.std() > 0.2
    for size in (1, 3):
        batches = list(generate(source(), sampling, range(10), LABELS, 0, size))
        assert [len(batch) for batch in batches] == [min(size, 10 - start) for start in range(0, 10, size)]
        parts = torch.cat(batches)
        assert torch.allclose(parts, whole, atol=1e-4)
        assert torch.equal(to_uint8(parts), to_uint8(whole))


@pytest.mark.parametrize("name", SAMPLERS)
def test_images_do_not_depend_on_order_or_neighbours(name):
    sampling = Sampling(name, steps=4)
    whole = images(sampling)
    chosen = [7, 2, 9, 0]
    some = images(sampling, chosen, [LABELS[i] for i in chosen], batch_size=3)
    assert torch.allclose(some, whole[chosen], atol=1e-4)
    assert torch.allclose(images(sampling, [10**9 + 7], [1]), images(sampling, [3, 10**9 + 7], [0, 1])[1:], atol=1e-4)


@pytest.mark.parametrize("name", SAMPLERS)
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


@pytest.mark.parametrize("name", SAMPLERS)
def test_generation_is_deterministic_and_leaves_the_global_stream_alone(name):
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    first = images(Sampling(name, steps=3))
    assert torch.equal(torch.rand(3), wanted)
    assert torch.equal(images(Sampling(name, steps=3)), first)


def test_no_indices_make_no_batches():
    assert list(generate(source(), Sampling(), [], [], 0, 4)) == []


def test_an_unconditional_network_is_sampled_without_labels():
    of = source(network(num_classes=0), num_classes=0, null_label=False)
    whole = images(Sampling(steps=4), labels=None, of=of)
    assert torch.allclose(images(Sampling(steps=4), labels=None, of=of, batch_size=3), whole, atol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_network_is_evaluated_as_often_as_promised(name, steps, guidance):
    calls = []

    def net(x, t, y):
        calls.append(len(x))
        return NET(x, t, y)

    sampling = Sampling(name, steps=steps, guidance=guidance)
    images(sampling, [0, 1], [0, 1], of=source(net))
    assert calls == [2 if guidance == 1 else 4] * sampling.evaluations
    assert sampling.evaluations == (2 * steps - 1 if name == "heun" else steps)


def test_guidance_of_one_is_the_network_itself():
    calls = []

    def net(x, t, y):
        calls.append(len(x))
        return NET(x, t, y)

    assert torch.equal(Guided(net, 1.0, CLASSES)(noise(), T, Y), NET(noise(), T, Y))
    assert calls == [5]


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.5, 4.0, 50.0])
def test_guidance_is_the_formula(scale):
    x = noise()
    cond, uncond = NET(x, T, Y), NET(x, T, torch.full_like(Y, CLASSES))
    wanted = uncond + scale * (cond - uncond)
    guided = Guided(NET, scale, CLASSES)(x, T, Y)
    assert torch.allclose(guided, wanted, atol=1e-5 * max(1, scale))
    assert (cond - uncond).abs().max() > 0.05
    assert torch.allclose(guided[3], uncond[3], atol=1e-5 * max(1, scale)), "the null label itself is not guided"


def test_guidance_of_zero_forgets_the_labels():
    none = images(Sampling(steps=4), labels=[CLASSES] * 10)
    assert torch.allclose(images(Sampling(steps=4, guidance=0.0)), none, atol=1e-4)


@pytest.mark.parametrize(
    ("num_classes", "null_label", "reason"), [(0, False, "class-conditional"), (CLASSES, False, "null label")]
)
def test_guidance_without_its_means_is_a_user_error(num_classes, null_label, reason):
    net = network(num_classes=num_classes, null_label=null_label)
    of = source(net, num_classes=num_classes, null_label=null_label)
    labels = [0] if num_classes else None
    guided = Sampling(steps=2, guidance=1.5)
    with pytest.raises(UserError, match=f"^guidance needs .*{reason}"):
        of.check(guided)
    with pytest.raises(UserError, match=f"^guidance needs .*{reason}"):
        images(guided, [0], labels, of=of)
    assert of.unguided(guided) == replace(guided, guidance=1.0)
    of.check(of.unguided(guided))
    assert images(of.unguided(guided), [0], labels, of=of).isfinite().all()


def test_guidance_stays_where_the_network_can_use_it():
    guided = Sampling(guidance=2.0)
    source().check(guided)
    assert source().unguided(guided) == guided


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(sampler="plms"), "unknown sampler 'plms': one of " + ", ".join(SAMPLERS).replace("+", r"\+")),
        (dict(steps=0), "steps must lie between 1 and 1000, got 0"),
        (dict(steps=-3), "steps must lie between 1 and 1000, got -3"),
        (dict(steps=1001), "steps must lie between 1 and 1000, got 1001"),
        (dict(guidance=-0.1), "guidance must be .*, got -0.1"),
        (dict(guidance=float("nan")), "guidance must be .*, got nan"),
        (dict(guidance=float("inf")), "guidance must be .*, got inf"),
    ],
)
def test_sampling_out_of_range_is_a_user_error(options, reason):
    with pytest.raises(UserError, match=f"^{reason}$"):
        Sampling(**options)


def test_sampling_describes_itself():
    assert Sampling().describe() == "dpm++25_w1"
    assert Sampling("heun", 18, 1.25).describe() == "heun18_w1.25"


@pytest.mark.parametrize("prediction", ["eps", "x"])
def test_clip_keeps_the_denoised_image_in_range_and_the_noise_agrees(prediction):
    def net(x, t, y):
        return 3 * NET(x, t, y)

    x_t = 2 * noise()
    free, _ = denoiser(net, PATH, prediction, Y, clip=False)(x_t, T)
    x, eps = denoiser(net, PATH, prediction, Y, clip=True)(x_t, T)
    assert free.abs().max() > 1.5
    assert torch.equal(x, free.clamp(-1, 1))
    assert torch.allclose(PATH.noised(x, eps, T), x_t, atol=1e-5)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("prediction", ["eps", "x"])
def test_the_denoiser_splits_its_input_into_data_and_noise(prediction, clip):
    x, eps = denoiser(NET, PATH, prediction, Y, clip)(noise(), T)
    assert torch.allclose(PATH.noised(x, eps, T), noise(), atol=1e-5)
    if not clip:
        assert torch.equal({"x": x, "eps": eps}[prediction], NET(noise(), T, Y))


@pytest.mark.parametrize("name", SAMPLERS)
def test_clip_keeps_the_samples_of_a_wild_network_in_range(name):
    def wild(x, t, y):
        return 10 * NET(x, t, y)

    clipped, free = (images(Sampling(name, steps=10, clip=clip), of=source(wild)).abs().max() for clip in (True, False))
    if name in ("dpm++", "ddim", "ddpm"):  # their last step lands on a denoised image
        assert clipped <= 1 + 1e-5
    assert clipped < free / 3


def noise_as_data(x_t, t, y):
    return PATH.data_from_noise(x_t, NET(x_t, t, y), t)


def data_as_noise(x_t, t, y):
    return PATH.noise_from_data(x_t, NET(x_t, t, y), t)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    ("one", "other"),
    [((NET, "eps"), (noise_as_data, "x")), ((NET, "x"), (data_as_noise, "eps"))],
    ids=["eps-net", "x-net"],
)
@pytest.mark.parametrize("name", SAMPLERS)
def test_predictions_of_noise_and_of_data_make_the_same_images(name, one, other, clip):
    sampling = Sampling(name, steps=4, clip=clip)
    wanted = images(sampling, of=source(*one))
    assert torch.allclose(images(sampling, of=source(*other)), wanted, atol=2e-4 * max(1, wanted.abs().max().item()))


def test_a_bfloat16_network_is_sampled_in_float32():
    def net(x, t, y):
        return NET(x, t, y).bfloat16()

    made = images(Sampling(steps=5), of=source(net))
    assert made.dtype == torch.float32
    assert (made - images(Sampling(steps=5))).abs().mean() < 0.02
    assert not torch.equal(made, made.bfloat16().float())
