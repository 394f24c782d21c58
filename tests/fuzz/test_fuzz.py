"""Files that were damaged or made to harm: each is read as it was written, or refused in one line, at a bound."""

import sys

import pytest
from cases import Sources, run
from image_kinds import IMAGE_KINDS
from tensor_kinds import TENSOR_KINDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and measures by /proc")
KINDS = {**TENSOR_KINDS, **IMAGE_KINDS}
SEED, NORMAL, EXHAUSTIVE = 0, 5, 208  # cases of each kind


@pytest.fixture(scope="session")
def sources(trained, encoded):
    return Sources(trained, encoded)


@pytest.mark.parametrize("name", KINDS)
def test_a_changed_file_is_read_right_or_refused(name, sources, tmp_path, exhaustive):
    template = tmp_path / "template"
    template.mkdir()
    KINDS[name].make(template, sources)
    failures = run(KINDS[name], name, template, SEED, EXHAUSTIVE if exhaustive else NORMAL)
    assert not failures, "\n" + "\n".join(failures)
