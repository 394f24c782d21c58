"""The small classifier on the digits, and Inception against torch-fidelity's own extractor with random weights."""

import urllib.error

import pytest
import torch

from uvit_decay.errors import UserError
from uvit_decay.metrics.features import Features, Inception, SmallClassifier

CPU = torch.device("cpu")
NO_PICTURES, NO_LABELS = torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)


@pytest.fixture(scope="module")
def digits():
    """Train and test pictures and labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = torch.from_numpy((data.images / 16 * 255).round()).to(torch.uint8)[:, None]
    labels = torch.from_numpy(data.target).to(torch.int64)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    return images[train], labels[train], images[test], labels[test]


def prepared(digits, steps=300):
    classifier = SmallClassifier(steps)
    classifier.prepare(digits[0], digits[1], CPU)
    return classifier


@pytest.fixture(scope="module")
def classifier(digits):
    return prepared(digits, steps=50)


def same(one: Features, other: Features):
    return torch.equal(one.features, other.features) and torch.equal(one.logits, other.logits)


@pytest.mark.slow
def test_the_classifier_reads_the_digits(digits):
    _, _, images, labels = digits
    classifier = prepared(digits)
    accuracy = (classifier(images).logits.argmax(1) == labels).double().mean()
    assert accuracy >= 0.99
    assert classifier.knows_labels


def test_features_are_float32_rows_of_the_promised_width(classifier, digits):
    found = classifier(digits[2][:7])
    assert found.features.shape == (7, classifier.dim) == (7, 64)
    assert found.logits.shape == (7, 10)
    assert found.features.dtype == found.logits.dtype == torch.float32
    assert not found.features.requires_grad


def test_features_of_a_picture_do_not_depend_on_its_batch(classifier, digits):
    images = digits[2][:20]
    whole = classifier(images).features
    parts = torch.cat([classifier(part).features for part in images.split(7)])
    assert torch.allclose(parts, whole, atol=1e-5)


def test_training_is_deterministic_and_leaves_the_global_stream_alone(digits):
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    first = prepared(digits, steps=20)
    assert torch.equal(torch.rand(3), wanted)
    with torch.inference_mode():  # where Lightning calls it in a validation
        second = prepared(digits, steps=20)
    assert same(first(digits[2]), second(digits[2]))
    assert not same(first(digits[2]), prepared(digits, steps=21)(digits[2]))


def test_preparing_twice_costs_nothing_and_changes_nothing(classifier, digits):
    net, before = classifier.net, classifier(digits[2])
    classifier.prepare(digits[2], digits[3].flip(0), CPU)
    assert classifier.net is net
    assert same(classifier(digits[2]), before)


def test_the_classifier_is_frozen_in_eval_mode(classifier):
    assert not any(p.requires_grad for p in classifier.net.parameters())
    assert not any(module.training for module in classifier.net.modules())


def test_autocast_around_the_classifier_changes_nothing(classifier, digits):
    wanted = classifier(digits[2])
    with torch.autocast("cpu", torch.bfloat16):
        assert same(classifier(digits[2]), wanted)


def test_the_classifier_takes_rgb_pictures(digits):
    rgb = digits[0].expand(-1, 3, -1, -1)
    classifier = SmallClassifier(steps=5)
    classifier.prepare(rgb, digits[1], CPU)
    assert classifier(rgb[:4]).features.shape == (4, 64)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of random weights in torch-fidelity's layout, written by its own network."""
    from torch_fidelity import feature_extractor_inceptionv3 as fidelity

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "load_state_dict_from_url", lambda *args, **options: {})
        patch.setattr(fidelity.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        state = fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"]).state_dict()
    g = torch.Generator().manual_seed(0)
    for name, value in state.items():
        if value.ndim > 1:  # He-normal: features stay of order one through the depth
            gain = 1 if name == "fc.weight" else 2
            value.normal_(std=(gain / value[0].numel()) ** 0.5, generator=g)
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def inception(weights):
    extractor = Inception(str(weights))
    extractor.prepare(NO_PICTURES, NO_LABELS, CPU)
    return extractor


@pytest.fixture(scope="module")
def photographs():
    g = torch.Generator().manual_seed(1)
    return torch.randint(256, (2, 3, 32, 32), generator=g, dtype=torch.uint8)


@pytest.fixture(scope="module")
def found(inception, photographs):
    return inception(photographs)


def test_the_file_has_the_real_layout(weights):
    state = torch.load(weights, weights_only=True)
    assert len(state) == 566
    assert {"Conv2d_1a_3x3.conv.weight", "Mixed_7c.branch_pool.bn.running_var", "fc.bias"} <= set(state)
    assert sum(value.numel() for value in state.values()) == pytest.approx(23.9e6, rel=0.01)


def test_inception_is_the_extractor_of_torch_fidelity(weights, photographs, found):
    from torch_fidelity.utils import create_feature_extractor

    theirs = create_feature_extractor(
        "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(weights), cuda=False
    )
    features, logits = theirs(photographs)
    assert torch.equal(found.features, features)
    assert torch.equal(found.logits, logits)


def test_inception_features_tell_pictures_apart(found, inception):
    assert found.features.shape == (2, inception.dim) == (2, 2048)
    assert found.logits.shape == (2, 1008)
    assert found.features.dtype == found.logits.dtype == torch.float32
    assert (found.features[0] - found.features[1]).norm() > 0.01 * found.features[0].norm() > 0
    assert not inception.knows_labels


def test_grey_pictures_are_repeated_to_rgb(inception, photographs):
    grey = photographs[:1, :1]
    assert same(inception(grey), inception(grey.expand(-1, 3, -1, -1)))


def test_autocast_around_inception_changes_nothing(inception, photographs, found):
    with torch.autocast("cpu", torch.bfloat16):
        assert same(inception(photographs), found)


def test_inception_is_frozen_in_eval_mode_and_loaded_once(inception):
    net = inception.net
    inception.prepare(NO_PICTURES, NO_LABELS, CPU)
    assert inception.net is net
    assert not any(p.requires_grad for p in net.parameters())
    assert not any(module.training for module in net.modules())


def test_a_missing_file_is_a_user_error_at_once(tmp_path):
    for path in (tmp_path / "missing.pth", tmp_path):
        with pytest.raises(UserError, match=r"^the Inception weights [^\n]* do not exist$"):
            Inception(str(path))


@pytest.mark.parametrize("kind", ["wrapped", "other", "one missing", "another shape"])
def test_a_file_of_another_layout_is_a_user_error(kind, weights, tmp_path):
    state = torch.load(weights, weights_only=True)
    content = {
        "wrapped": {"state_dict": {"fc.bias": state["fc.bias"]}},
        "other": {"conv1.weight": torch.zeros(64, 3, 7, 7)},
        "one missing": {name: value for name, value in state.items() if name != "fc.bias"},
        "another shape": {**state, "fc.bias": torch.zeros(1000)},
    }[kind]
    path = tmp_path / "weights.pth"
    torch.save(content, path)
    extractor = Inception(str(path))
    with pytest.raises(UserError, match=rf"^{path} does not hold torch-fidelity's Inception weights: [^\n]+$"):
        extractor.prepare(NO_PICTURES, NO_LABELS, CPU)
    assert extractor.net is None


def test_no_weights_and_no_network_are_a_user_error(monkeypatch, tmp_path):
    def unreachable(*args, **options):
        raise urllib.error.URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # an empty cache
    monkeypatch.setattr(torch.hub, "urlopen", unreachable)
    with pytest.raises(UserError, match=r"^the Inception weights cannot be downloaded \(.*no network.*\)[^\n]+$"):
        Inception().prepare(NO_PICTURES, NO_LABELS, CPU)


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


@pytest.mark.parametrize("kind", ["text", "empty", "list", "code"])
def test_a_file_that_is_no_state_dict_is_a_user_error_and_never_runs(kind, tmp_path):
    path = tmp_path / "weights.pth"
    if kind in ("text", "empty"):
        path.write_text("<html>not found</html>" if kind == "text" else "")
    else:
        torch.save([1.0] if kind == "list" else {"fc.weight": Evil()}, path)
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(UserError, match=rf"^the Inception weights {path} [^\n]+$"):
        Inception(str(path)).prepare(images, torch.zeros(1, dtype=torch.int64), torch.device("cpu"))
