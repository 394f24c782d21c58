"""The call of the diffusers pipeline."""

import numpy as np
import pytest
import torch
from hub_folders import BUNDLED, own_modules, sample_pixels, seed_generator, stack_pictures, write_denoiser  # noqa: F401
from refusals import find_line

from uvit_decay.checkpoint import load
from uvit_decay.diffusion import noise_path
from uvit_decay.diffusion.noise_path import Linear, NoisePath
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.hub.denoiser import PATHS
from uvit_decay.hub.folder import build_pipeline
from uvit_decay.hub.pipeline import draw_seed
from uvit_decay.nn import SiT
from uvit_decay.terminal.errors import UserError

FAST = {"num_inference_steps": 2}


@pytest.fixture(scope="module")
def pipeline():
    """Return the pipeline of the bundled checkpoint."""
    pipeline = build_pipeline(load(BUNDLED))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pictures(pipeline, labels, generator, **options):
    return stack_pictures(pipeline(class_labels=labels, generator=generator, **{**FAST, **options}).images)


def test_a_second_call_makes_other_pictures_and_the_same_generators_the_same(pipeline):
    generators = seed_generator(3), seed_generator(3)
    first, second = ([pictures(pipeline, [4, 4], generator) for _ in range(2)] for generator in generators)
    assert (np.array(first) == np.array(second)).all()
    assert (first[0] != first[1]).mean() > 0.3
    assert (first[0][0] != first[0][1]).mean() > 0.3
    assert (first[0] == sample_pixels(BUNDLED, range(2), classes=("4",), seed=3, steps=2)).all()


def test_a_generator_that_is_not_fresh_is_another_seed(pipeline):
    used = seed_generator(3)
    torch.rand(1, generator=used)
    assert draw_seed(used) not in (3, draw_seed(seed_generator(3)))


def test_of_several_generators_each_makes_the_first_picture_of_its_seed(pipeline):
    several = pictures(pipeline, [1, 2, 1], [seed_generator(7), seed_generator(8), seed_generator(7)], sampler="ddpm")
    for i, (label, seed) in enumerate([(1, 7), (2, 8), (1, 7)]):
        assert (
            np.abs(several[i] - pictures(pipeline, label, seed_generator(seed), sampler="ddpm")[0].astype(int)).max()
            <= 1
        )


def test_without_a_generator_pictures_follow_the_global_seed(pipeline):
    torch.manual_seed(0)
    first, second = pictures(pipeline, 3, None), pictures(pipeline, 3, None)
    assert (first != second).any()
    torch.manual_seed(0)
    assert (first == pictures(pipeline, 3, None)).all()


def test_labels_are_numbers_names_or_a_tensor(pipeline):
    expected = pictures(pipeline, [3, 7], seed_generator(0))
    for labels in (["3", "7"], torch.tensor([3, 7]), np.array([3, 7]), (3, "7")):
        assert (pictures(pipeline, labels, seed_generator(0)) == expected).all()
    assert (pictures(pipeline, np.int64(3), seed_generator(0)) == expected[:1]).all()


def test_output_types(pipeline):
    given = {"class_labels": [1, 2], **FAST}
    uint8 = stack_pictures(pipeline(**given, generator=seed_generator(0)).images)
    images = {
        name: pipeline(**given, generator=seed_generator(0), output_type=name).images for name in ("np", "pt", "latent")
    }
    assert images["np"].shape == (2, 8, 8, 1)
    assert ((images["np"] * 255).round() == uint8).all()
    assert (images["pt"].permute(0, 2, 3, 1).numpy() == images["np"]).all()
    assert torch.equal((images["latent"] / 2 + 0.5).clamp(0, 1), images["pt"])
    (as_tuple,) = pipeline(**given, generator=seed_generator(0), return_dict=False)
    assert (stack_pictures(as_tuple) == uint8).all()


def test_every_noise_path_has_a_name():
    kinds = [kind for kind in vars(noise_path).values() if isinstance(kind, type) and issubclass(kind, NoisePath)]
    assert {kind for kind in kinds if not kind.__abstractmethods__} == set(PATHS.values())


def test_an_adaptive_sampler_has_one_image_at_a_time(tmp_path):
    net = SiT(4, 2, 1, dim=8, depth=2, heads=2, num_classes=2)
    file = write_denoiser(tmp_path / "n.safetensors", net, Linear(), "velocity", Sampling("dopri5"), ("a", "b"))
    pipeline = build_pipeline(load(file))
    alone = pictures(pipeline, [1], seed_generator(0), num_inference_steps=None)
    together = pictures(pipeline, [1, 0], seed_generator(0), num_inference_steps=None)
    assert (alone[0] == together[0]).all()


def test_weights_of_half_the_size(tmp_path):
    net = SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10, qk_norm=True, norm_type="rms")
    file = tmp_path / "sit.safetensors"
    write_denoiser(file, net, Linear(), "velocity", Sampling("heun", 3), tuple("abcdefghij"))
    pipeline = build_pipeline(load(file))
    exact = pictures(pipeline, [1, 2], seed_generator(0), output_type="np")
    pipeline.to(torch.bfloat16)
    assert {weight.dtype for weight in pipeline.denoiser.parameters()} == {torch.bfloat16}
    assert np.abs(pictures(pipeline, [1, 2], seed_generator(0), output_type="np") - exact).mean() < 0.03


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ({}, "class_labels"),
        ({"class_labels": [10]}, ("class 10", "0 to 9")),
        ({"class_labels": [1.5]}, "class 1.5"),
        ({"class_labels": "eleven"}, "'eleven'"),
        ({"class_labels": [1, 2], "num_images": 3}, 2),
        ({"class_labels": [1], "generator": [seed_generator(0), seed_generator(1)]}, (2, "1 images")),
        ({"class_labels": [1], "output_type": "jpeg"}, "pil, np, pt, latent"),
        ({"class_labels": [1], "num_inference_steps": 0}, (1, 1000)),
    ],
)
def test_mistakes_are_one_line(pipeline, call, problem):
    with pytest.raises((ValueError, UserError)) as raised:
        pipeline(**call)
    find_line(str(raised.value), problem)
