"""A user's own extractor, in both kinds of files."""

import hashlib
import warnings

import pytest
import torch
from torch import nn

from uvit_decay.metrics import CustomExtractor
from uvit_decay.runtime.errors import UserError

CPU = torch.device("cpu")
NO_LABELS = torch.zeros(0, dtype=torch.int64)
G = torch.Generator().manual_seed(0)
IMAGES = torch.randint(256, (5, 3, 8, 8), generator=G, dtype=torch.uint8)


class Means(nn.Module):
    """Mean colours."""

    def forward(self, x):
        return x.float().mean((2, 3))


class WithLogits(Means):
    def forward(self, x):
        return x.double().mean((2, 3)), x.float().amax((2, 3)).repeat(1, 2)


class LikeStyleGAN(Means):
    def forward(self, x, return_features: bool = False):
        return x.float().mean((2, 3)) if return_features else x.float().mean((2, 3))[:, :1]


class Unpooled(Means):
    def forward(self, x):
        return x.float()


class Integers(Means):
    def forward(self, x):
        return x.flatten(1)


class Three(Means):
    def forward(self, x):
        return x.float().mean((2, 3)), x.float().mean((2, 3)), x.float().mean((2, 3))


class Infinite(Means):
    def forward(self, x):
        return x.float().mean((2, 3)) / 0


class WantsMore(Means):
    def forward(self, x):
        return x.float().mean((2, 3)) @ torch.zeros(4, 2)


def scripted(net, path):
    with warnings.catch_warnings(action="ignore"):  # of torch.jit's end
        torch.jit.script(net).save(str(path))
    return path


def exported(net, path):
    batch = torch.export.Dim("n", min=1)
    program = torch.export.export(net, (IMAGES,), dynamic_shapes=({0: batch},))
    torch.export.save(program, str(path))
    return path


def prepared(path):
    extractor = CustomExtractor(str(path))
    extractor.prepare(IMAGES[:0], NO_LABELS, CPU)
    return extractor


@pytest.mark.parametrize(("write", "name"), [(scripted, "net.pt"), (exported, "net.pt2"), (scripted, "net.pt2")])
def test_features_are_those_of_the_file(write, name, tmp_path):
    extractor = prepared(write(Means(), tmp_path / name))
    outputs = extractor(IMAGES)
    torch.testing.assert_close(outputs.features, IMAGES.float().mean((2, 3)))
    assert outputs.logits is outputs.spatial is None
    assert (extractor.name, extractor.widths, extractor.channels) == (name, {"features": 3}, 3)
    assert not extractor.needs_labels
    assert not outputs.features.requires_grad
    grey = IMAGES[:, :1]
    assert torch.equal(extractor(grey).features, extractor(grey.expand(-1, 3, -1, -1)).features)


@pytest.mark.parametrize(("write", "name"), [(scripted, "net.pt"), (exported, "net.pt2")])
def test_logits_may_come_along_and_all_is_float32(write, name, tmp_path):
    extractor = prepared(write(WithLogits(), tmp_path / name))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = extractor(IMAGES)
    assert extractor.widths == {"features": 3, "logits": 6}
    assert outputs.logits.shape == (5, 6)
    assert outputs.features.dtype == outputs.logits.dtype == torch.float32


def test_stylegan_files_are_asked_for_features(tmp_path):
    assert prepared(scripted(LikeStyleGAN(), tmp_path / "net.pt")).widths == {"features": 3}


def test_the_identity_is_name_and_checksum(tmp_path):
    path = scripted(Means(), tmp_path / "net.pt")
    identity = f"net.pt-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    assert prepared(path).fingerprint() == identity
    assert prepared(scripted(WithLogits(), path)).fingerprint() != identity


def test_a_missing_file_is_a_user_error_at_once(tmp_path):
    for path in (tmp_path / "missing.pt", tmp_path):
        with pytest.raises(UserError, match=r"^the feature extractor [^\n]* does not exist$"):
            CustomExtractor(str(path))


@pytest.mark.parametrize("kind", ["text", "state_dict"])
def test_a_file_of_another_kind_is_a_user_error(kind, tmp_path):
    path = tmp_path / "net.pt"
    if kind == "text":
        path.write_text("not a network")
    else:
        torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(
        UserError, match=rf"^{path} is neither a TorchScript archive \([^\n]+\) nor torch.export's .pt2"
    ):
        prepared(path)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Unpooled(), r"must give float \(2, d\) features, .* not torch.float32 \(2, 3, 8, 8\)"),
        (Integers(), r"must give float \(2, d\) features, .* not torch.uint8 \(2, 192\)"),
        (Three(), r"must give float \(2, d\) features, .* not torch.float32 \(2, 3\), torch.float32 \(2, 3\), "),
        (Infinite(), "gives features or logits that are not finite"),
        (WantsMore(), r"cannot take \(2, 3, 8, 8\) images: "),
    ],
)
def test_a_network_that_gives_something_else_is_a_user_error(net, reason, tmp_path):
    path = scripted(net, tmp_path / "net.pt")
    with pytest.raises(UserError, match=rf"^{path} {reason}[^\n]*$"):
        prepared(path)
