"""Which metrics are computed of which features, and what is said of those that are not."""

import pytest
import torch
from refusals import find_line, raises_user_error

from uvit_decay.encoders.extractors import Extractor, Features
from uvit_decay.evaluation.metric_table import (
    Inputs,
    MetricOptions,
    name_all_metrics,
    name_metrics,
    summary,
)
from uvit_decay.metrics.frechet import Moments


class Named(Extractor):
    """Features that are never extracted."""

    name, sha256 = "named", "0"

    def __init__(self, family="inception", **widths) -> None:
        self.family, self.widths = family, {"features": 64, **widths}

    def prepare(self, images, labels, device) -> None: ...

    def extract(self, images) -> Features: ...


class Drawn:
    """Features of one side that are drawn at random."""

    def __init__(self, seed) -> None:
        self.features = torch.randn(40, 8, generator=torch.Generator().manual_seed(seed))

    def tensor(self, kind) -> torch.Tensor:
        return self.features

    def statistics(self, kind):
        moments = Moments(8, sync=False)
        moments.update(self.features)
        return moments.compute()


@pytest.mark.parametrize(
    ("family", "names", "allowed"),
    [
        ("inception", ("fid", "is", "kid", "prc"), "fid,is,kid,prc,mind"),
        ("dinov2", ("fdd", "is", "kdd", "prc"), "fdd,is,kdd,prc,mind"),
        ("other", ("fd", "is", "kid", "prc"), "fd,is,kid,prc,mind"),
    ],
)
def test_a_distance_has_the_name_of_its_features(family, names, allowed):
    extractor = Named(family, logits=10)
    assert MetricOptions().choose(extractor, 2000) == names
    assert MetricOptions((names[0], "prc")).choose(extractor, 2000) == (names[0], "prc")
    for other in {"fid", "fdd", "fd", "kid", "kdd"} - {*names}:
        with raises_user_error("`metrics`", other, "named", allowed):
            MetricOptions((other,)).check_names(extractor)
    inputs = Inputs(Drawn(0), Drawn(1), MetricOptions(kid_subset=20), torch.device("cpu"), extractor)
    named = name_metrics(extractor)
    fd, kid = names[0], names[2]
    assert set(named[fd].compute(inputs)) == {fd}
    assert set(named[kid].compute(inputs)) == {kid, f"{kid}_std"}


def test_a_metric_needs_its_output_and_its_reference():
    assert MetricOptions().choose(Named("dinov2"), 2000) == ("fdd", "kdd", "prc")
    assert MetricOptions().choose(Named("dinov2"), 0) == ("fdd",)
    with raises_user_error("`metrics`", "is", "logits", "named"):
        MetricOptions(("is",)).check_names(Named("dinov2"))


def test_metrics_by_default_that_are_left_out_have_a_reason():
    options = MetricOptions()
    assert options.explain_omissions(Named(logits=10), 1000) == {}
    reasons = options.explain_omissions(Named(), 150)
    assert list(reasons) == ["is", "kid"]
    find_line(reasons["is"], "named", "logits")
    find_line(reasons["kid"], "150 images", 1000, "`kid_subset`")
    reasons = options.explain_omissions(Named("dinov2", logits=10), 0)
    assert list(reasons) == ["kdd", "prc"]
    assert all("statistics" in reason for reason in reasons.values())
    assert MetricOptions(("fid",)).explain_omissions(Named(), 0) == {}


def test_the_help_names_the_metrics():
    named = name_all_metrics()
    assert f"some of {','.join(named)}; default" in MetricOptions.__doc__
    assert [name for name, metric in named.items() if not metric.by_default] == ["sfid", "mind"]


def test_values_in_a_line_have_titles_and_their_spread():
    values = {"fd": 0.6234, "is": 6.5432, "is_std": 0.2712, "label_consistency": 0.98912}
    line = "FD (small-cnn-2) 0.62 (real images 0.13), IS 6.54 +- 0.27, label consistency 0.989"
    assert summary(values, "small-cnn-2-0123456789ab", {"fd": 0.13}) == line
    assert (
        summary({"kid": 0.0123456, "kid_std": 0.001, "recall": 0.5}, "named") == "KID 0.01235 +- 0.00100, recall 0.500"
    )
