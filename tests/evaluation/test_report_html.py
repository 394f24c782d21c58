"""The report: what it shows, what it escapes, and that it needs nothing but itself."""

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import torch
from PIL import Image

from uvit_decay.evaluation.metric_table import collect_values
from uvit_decay.evaluation.report_html import Neighbours, Report, write_html


def random_images(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


NEIGHBOURS = Neighbours(
    random_images(2, 3, 8, 8), random_images(2, 4, 3, 8, 8), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8.25]])
)
REPORT = Report(
    title="Digits, step 2000",
    metrics={"mind": float("nan"), "is": 9.2, "is_std": 0.104, "kid": -0.000123, "odd one": 12.34567},
    protocol={"n": 2500, "sampler": {"steps": 25, "guidance": 1.5}, "seed": 2020, "cfg": None, "ok": True},
    remarks=("n = 2,500 is below 10,000: not comparable with published numbers",),
    samples=random_images(12, 3, 8, 8),
    columns=4,
    class_names=("a", "b", "c", "d"),
    neighbours=NEIGHBOURS,
    coverage={"one": 0.25, "two": 1.0, "three": 0.5},
)


class Page(HTMLParser):
    """Texts, tags and attributes of a page whose tags must be balanced."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.tags, self.attributes, self.open = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(" ".join(data.split()))


def written(tmp_path, report):
    write_html(tmp_path / "report.html", report)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


EMBEDDED = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")


def decoded(text):
    return [Image.open(io.BytesIO(base64.b64decode(part))) for part in EMBEDDED.findall(text)]


def test_everything_is_there(tmp_path):
    text = written(tmp_path, REPORT)
    assert "sampler.steps</th><td>25<" in text
    texts = Page(text).texts
    headings = {"Digits, step 2000", *REPORT.remarks, "Samples", "Memorisation", "Coverage of the classes", "Protocol"}
    metrics = {"9.20 ± 0.10", "−0.00012", "12.35", "nan", "lower is better", "higher is better"}
    assert headings | metrics | {"8.25", "25.0 %", "100.0 %", "1.5", "2020", "None", "True"} <= set(texts)
    assert "is_std" not in texts
    without = Page(written(tmp_path, replace(REPORT, neighbours=None, coverage=None, remarks=()))).texts
    assert {"Memorisation", "Coverage of the classes", *REPORT.remarks} <= set(texts) - set(without)


def test_every_metric_says_what_it_means(tmp_path):
    values = collect_values()
    report = replace(REPORT, metrics=dict.fromkeys(values, 0.5), protocol={"extractor": "small-cnn-0123456789ab"})
    page = " ".join(Page(written(tmp_path, report)).texts)
    for key, value in values.items():
        title = "FD (small-cnn)" if key == "fd" else value.title
        assert f"{title}  {0.5:.{value.decimals}f}  {value.meaning}; {value.better} is better" in page


def test_the_images_are_inside_and_nothing_is_outside(tmp_path):
    """A grid, and for each sample itself and its neighbours."""
    text = written(tmp_path, REPORT)
    assert {value for name, value in Page(EMBEDDED.sub("data:", text)).attributes if name in ("src", "href")} == {
        "data:"
    }
    assert not re.search(r"http|url\(|@import|<script|<link", EMBEDDED.sub("", text))
    grid, *others = decoded(text)
    assert grid.width > 4 * 64
    assert len(others) == 2 * (1 + 4)
    first = torch.from_numpy(np.array(others[0])).permute(2, 0, 1)
    assert torch.equal(first, NEIGHBOURS.samples[0])
    large = Neighbours(random_images(1, 1, 300, 300), random_images(1, 2, 1, 300, 300), torch.rand(1, 2))
    images = decoded(written(tmp_path, replace(REPORT, samples=random_images(4, 1, 8, 8), neighbours=large)))
    assert [image.size for image in images[1:]] == [(128, 128)] * 3


HOSTILE = '<script>alert("1")</script>\' onload=x & {{ 7 * 7 }}'


def test_names_are_escaped(tmp_path):
    texts = {"title": HOSTILE, "class_names": (HOSTILE,) * 4, "coverage": {HOSTILE: 0.5}, "remarks": (HOSTILE,)}
    report = replace(REPORT, **texts, protocol={HOSTILE: HOSTILE}, metrics={HOSTILE: 1.0})
    page = Page(written(tmp_path, report))
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.texts.count(" ".join(HOSTILE.split())) == 7  # title and heading, remark, metric, class, name and value
    assert ("title", HOSTILE) in page.attributes


def names(page):
    return [value for name, value in page.attributes if name == "title"]


def test_up_to_a_hundred_classes_have_a_bar_each_and_of_a_thousand_both_ends(tmp_path):
    coverage = {f"class {i}": (i * 37 % 99) / 99 for i in range(99)} | {"n01440764": 1.0}
    page = Page(written(tmp_path, replace(REPORT, coverage=coverage)))
    assert names(page)[:99] == sorted(coverage, key=coverage.get)[:99]
    assert names(page)[99] == "n01440764, tench, Tinca tinca"
    assert "tench" in page.texts
    text = written(tmp_path, replace(REPORT, coverage={f"class {i}": i / 999 for i in range(1000)}))
    assert names(Page(text)) == [f"class {i}" for i in [*range(20), *range(999, 979, -1)]]
