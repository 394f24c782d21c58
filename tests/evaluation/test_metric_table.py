"""Which metrics are computed of which features, and what is said of those that are not."""

from refusals import find_line, raises_user_error

from uvit_decay.evaluation.metric_table import (
    DINOV2,
    METRICS,
    OTHER,
    MetricOptions,
    collect_values,
    format_title,
    summary,
)
from uvit_decay.metrics.extractors import Extractor, Features


class Named(Extractor):
    """Features that are never extracted."""

    name, sha256 = "named", "0"

    def __init__(self, family="inception", **widths) -> None:
        self.family, self.widths = family, {"features": 64, **widths}

    def prepare(self, images, labels, device) -> None: ...

    def extract(self, images) -> Features: ...


def test_distances_between_features_of_dinov2_have_names_of_their_own():
    options = MetricOptions()
    assert options.choose(Named(logits=10), 2000) == ("fid", "is", "kid", "prc")
    assert options.choose(Named(OTHER, logits=10), 2000) == ("fd", "is", "kid", "prc")
    assert options.choose(Named(DINOV2), 2000) == ("prc", "fdd", "kdd")
    assert options.choose(Named(DINOV2), 0) == ("fdd",)
    assert [collect_values()[name].title for name in ("fid", "fdd", "kid", "kdd")] == ["FID", "FDD", "KID", "KDD"]
    assert [next(iter(METRICS[name].values)) for name in ("fdd", "kdd")] == ["fdd", "kdd"]
    for metric in ("fid", "kid", "is"):
        with raises_user_error(f"--metrics {metric}", "named", "prc,mind,fdd,kdd"):
            MetricOptions((metric,)).choose(Named(DINOV2), 2000)
    with raises_user_error("fdd", "named", "fid,kid,prc,mind"):
        MetricOptions(("fdd",)).choose(Named(), 2000)


def test_metrics_by_default_that_are_left_out_have_a_reason():
    options = MetricOptions()
    assert options.explain_omissions(Named(logits=10), 1000) == {}
    reasons = options.explain_omissions(Named(), 150)
    assert list(reasons) == ["is", "kid"]
    find_line(reasons["is"], "named", "logits")
    find_line(reasons["kid"], "150 images", 1000, "--kid-subset 150")
    reasons = options.explain_omissions(Named(DINOV2), 0)
    assert list(reasons) == ["prc", "kdd"]
    assert all("statistics" in reason for reason in reasons.values())
    assert MetricOptions(("fid",)).explain_omissions(Named(), 0) == {}


def test_the_name_of_a_distance_is_that_of_its_features():
    assert MetricOptions(("fd", "prc")).choose(Named(OTHER), 2000) == ("fd", "prc")
    with raises_user_error("--metrics"):
        MetricOptions(("fid",)).choose(Named(OTHER), 2000)
    assert MetricOptions(("fid", "prc")).choose(Named(), 2000) == ("fid", "prc")
    with raises_user_error("--metrics fd", "named"):
        MetricOptions(("fd",)).choose(Named(), 2000)
    assert format_title("fd", "FD", "small-cnn-0123456789ab") == "FD (small-cnn)"
    assert format_title("fid", "FID", "inception-v3-adm-0123456789ab") == "FID"


def test_values_in_a_line_have_titles_and_their_spread():
    values = {"fd": 0.6234, "is": 6.5432, "is_std": 0.2712, "label_consistency": 0.98912}
    line = "FD (small-cnn) 0.62, IS 6.54 +- 0.27, label consistency 0.989"
    assert summary(values, "small-cnn-0123456789ab") == line
    assert (
        summary({"kid": 0.0123456, "kid_std": 0.001, "recall": 0.5}, "named") == "KID 0.01235 +- 0.00100, recall 0.500"
    )
