"""Which images and layers are probed, and whether a network can be probed on them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from uvit_decay.diffusion.noise_path import NoisePath
from uvit_decay.nn.intermediates import HasIntermediates, check_pool, layer_indices
from uvit_decay.representations.options import NOISE_ALONE, Probing, ProtocolOptions
from uvit_decay.representations.protocols import GridProtocol, Protocol, find_protocol
from uvit_decay.representations.reference import NEIGHBOURS
from uvit_decay.runtime.distributed import COMPARED, Processes
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.program import localise
from uvit_decay.runtime.random import subset

if TYPE_CHECKING:  # data are Lightning's
    from uvit_decay.data import ImageData


def choose_images(options: ProtocolOptions, data: ImageData) -> tuple[list[int], list[int]]:
    """Return the indices of the training images and of the test images to probe: fixed random choices."""
    train = subset(data.train, options.max_train, "probe train")
    test = subset(data.test, options.max_test, "probe test")
    return train, test


def default_layer(net: HasIntermediates, path: NoisePath | None) -> int:
    """Return the index of the default layer: U-ViT's middle, SiT's last encoder block, an encoder's last block."""
    if path is None:
        return len(net.layers) - 1
    return len(net.layers) // 2


def check_network(net: object, path: NoisePath | None) -> None:
    """Raise a UserError if the network has no readable features, or is a denoiser without a null label."""
    if not isinstance(net, HasIntermediates):
        raise UserError(
            f"{type(net).__name__} cannot be probed: it has no forward_intermediates; add it (docs/extending.md), or "
            "remove LinearProbes from the callbacks"
        )
    if path is not None and net.num_classes and not net.null_label:
        advice = "train with null_label true, or remove LinearProbes from the callbacks"
        raise UserError(f"this network cannot be probed: it was trained without the null label; {advice}")


def check_data(data: ImageData, protocol: Protocol, options: ProtocolOptions) -> None:
    """Raise a UserError if there are not enough labelled images for a protocol with a classifier."""
    if len(data.class_names) < 2:
        count = len(data.class_names) or "no"
        plural = "" if count == 1 else "es"
        advice = "sort the images into class folders, or remove LinearProbes in train.py"
        raise UserError(localise(f"{data.name} has {count} class{plural}, probes need two or more: {advice}"))
    if data.test is None:
        text = (
            "probes need test images: give them (evaluate.py: --test, or test_path of a configuration; train.py: "
            "--data.test_path or --data.holdout 0.1), or remove LinearProbes in train.py"
        )
        raise UserError(localise(text))
    train, _ = choose_images(options, data)
    protocol.check_images(data.train.labels[train], data.class_names, options)


def check_same_images(data: ImageData, options: Mapping[str, Any], processes: Processes) -> None:
    """Raise a UserError on all processes if they have different images or options."""
    checksums = []
    for images in (data.train, data.test):
        compared, _ = images[subset(images, COMPARED, "compared")]
        checksums.append(zlib.crc32(compared.cpu().contiguous().numpy()))
    processes.check_same(f"images of {data.name}, or options", [options, checksums])


def check_noise_share(path: NoisePath | None, data: ImageData) -> None:
    """Raise a UserError if a noise share needs noise that an encoder does not see, or test images that are missing."""
    if path is None:
        raise UserError("this network is an encoder and sees images without noise: it has no noise share; leave it out")
    if data.test is None or len(data.test) < 2:
        advice = "give them (evaluate.py: --test, or test_path of a configuration)"
        raise UserError(f"a noise share needs two test images or more: {advice}")


def check_probed(net: object, path: NoisePath | None, data: ImageData, probing: Probing) -> None:
    """Raise a UserError if the network cannot be probed on this data.

    Args:
        net: the network.
        path: noise path of a denoiser's input; None for an encoder.
        data: training and test images.
        probing: the options of the probes.
    """
    check_network(net, path)
    layer_indices(net.layers, probing.layers)
    if probing.draws_of_noise:
        check_noise_share(path, data)
    if probing.protocol == NOISE_ALONE:
        return
    protocol = find_protocol(probing.protocol, GridProtocol)
    protocol.check(probing, is_encoder=path is None)
    check_pool(net, probing.pool)
    check_data(data, protocol, probing)
    fewest = NEIGHBOURS + 2
    if protocol.needs_reference and min(len(data.test), probing.max_test) < fewest:
        raise UserError(f"an alignment by {NEIGHBOURS} nearest neighbours needs at least {fewest} test images")
