"""Classes of samples and of references that are the same."""

import pytest

from uvit_decay.evaluation.comparison import are_same_classes


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (("cat", "dog"), ("cat", "dog"), True),
        (("cat", "dog"), ("dog", "cat"), False),
        (("0", "1"), ("cat", "dog", "emu"), True),
        (("0", "1", "2"), ("cat", "dog"), False),
        (tuple(map(str, range(11))), tuple(sorted(map(str, range(11)))), False),
        (tuple(sorted(map(str, range(11)))), tuple("abcdefghijk"), False),
    ],
)
def test_numbers_count_classes_unless_these_are_numbers_in_another_order(ours, theirs, same):
    assert are_same_classes(ours, theirs) is same
