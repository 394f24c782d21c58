"""Protocols by name: each gives its extractor, by itself, and its numbers have its name."""

from typing import get_args

import pytest
from conftest import ROOT

from uvit_decay.encoders import DINOv2, Inception, SmallClassifier
from uvit_decay.encoders.resize import DINOv2Protocol, Protocol
from uvit_decay.encoders.table import EXTRACTORS, RESIZINGS, FeatureOptions


@pytest.mark.parametrize("name", RESIZINGS)
def test_a_protocol_alone_is_enough(name):
    extractor = FeatureOptions(protocol=name).extractor(spatial=False)
    assert isinstance(extractor, {"inception": Inception, "dinov2": DINOv2}[RESIZINGS[name]])
    assert extractor.protocol == name
    assert name in extractor.name
    with_both = FeatureOptions(features=RESIZINGS[name], protocol=name).extractor(spatial=False)
    assert with_both.name == extractor.name


def test_the_table_has_the_protocols_of_the_extractors_and_help_and_page_have_the_table():
    assert list(RESIZINGS) == [*get_args(Protocol), *get_args(DINOv2Protocol)]
    assert set(RESIZINGS.values()) < set(EXTRACTORS)
    for names in (RESIZINGS, EXTRACTORS):
        assert ", ".join(names) in FeatureOptions.__doc__
    page = (ROOT / "docs" / "evaluation.md").read_text()
    assert all(f"| `{name}` | {features} |" in page for name, features in RESIZINGS.items())


def test_defaults_are_what_they_were():
    assert FeatureOptions().extractor(spatial=True).name == "inception-v3-pytorch-fid"
    assert FeatureOptions(features="inception", protocol="adm").extractor(spatial=False).name == "inception-v3-adm"
    assert FeatureOptions(features="dinov2").extractor(spatial=False).name == "dinov2-edm2"
    for protocol in (None, "adm"):
        extractor = FeatureOptions(features="digits", protocol=protocol).extractor(spatial=False)
        assert isinstance(extractor, SmallClassifier)
