"""Data that cannot be probed."""

import pytest
from image_noise import tree
from refusals import raises_user_error

from uvit_decay.data import Images
from uvit_decay.representations.probe_options import Probing
from uvit_decay.representations.probe_protocols import GridProtocol, find_protocol
from uvit_decay.representations.probing import check_data


@pytest.mark.parametrize(
    ("names", "words"),
    [(["cat"], ("1 class,", "class folders")), (["cat", "dog"], ("--data.test_path",))],
)
def test_a_single_class_and_missing_test_images_are_told_apart(names, words, tmp_path):
    tree(tmp_path, [f"{name}/{i}.png" for name in names for i in range(3)], size=8)
    data = Images(tmp_path, channels=1, batch_size=1, image_size=8)
    data.load()
    probing = Probing()
    with raises_user_error(*words):
        check_data(data, find_protocol(probing.protocol, GridProtocol), probing)
