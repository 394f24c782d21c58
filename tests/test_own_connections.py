"""The connections of docs/extending.md, trained, resumed, loaded, sampled and probed; hyper-connections; refusals."""

import re
import sys

import pytest
import torch
from conftest import ROOT, pixels, sample, train
from evaluations import evaluate
from refusals import find_line, raises_user_error, refused
from test_docs import code

from uvit_decay import load
from uvit_decay.__main__ import main
from uvit_decay.decay import Connection, Plan
from uvit_decay.decay.streams import HyperConnection
from uvit_decay.nn import MAE, SiT, UViT, ViT

TITLE = "A connection"
SMALL = ["--model.net.dim=16", "--model.net.depth=2", "--model.net.heads=2", "--data.batch_size=8"]
SMALL += ["--trainer.limit_val_batches=0", "--trainer.callbacks=EMA", "--trainer.callbacks+=LastCheckpoint"]
OF_MAE = dict(image_size=8, pixels="unit", channels=1, patch_size=2, decoder_dim=16, decoder_depth=1, decoder_heads=2)
CONFIGS = {
    "UViT": ["digits"],
    "SiT": ["digits_sit"],
    "MAE": ["mae_cifar10", "--data=Digits", *(f"--model.net.{name}={value}" for name, value in OF_MAE.items())],
}


def fit(monkeypatch, folder, name, steps, *more, network="UViT"):
    """Train in a run folder of its own and return its newest checkpoint."""
    config, *options = CONFIGS[network]
    flags = [f"--config={ROOT / 'configs' / config}.yaml", *options, *SMALL, f"--trainer.max_steps={steps}"]
    train(monkeypatch, folder, "fit", *flags, "--trainer.logger.experiment", name, *more)
    return max(folder.glob(f"runs/{name}/version_*/checkpoints/last.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Highway", "TwoStreams", "Orthogonal"])
@pytest.mark.parametrize("network", CONFIGS)
def test_a_connection_of_ones_own_is_trained_resumed_loaded_sampled_and_probed(
    network, name, mine, tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine.py").write_text(code(TITLE))
    flags = ["--trust=mine", f"--model.net.schedule=mine.{name}"]
    whole = fit(monkeypatch, tmp_path, "whole", 3, *flags, network=network)
    part = fit(monkeypatch, tmp_path, "part", 2, *flags, network=network)
    resumed = fit(monkeypatch, tmp_path, "part", 3, *flags, f"--ckpt_path={part}", network=network)
    contents = [torch.load(file, weights_only=True) for file in (whole, resumed)]
    assert contents[0]["state_dict"].keys() == contents[1]["state_dict"].keys()
    for weight, value in contents[0]["state_dict"].items():
        assert torch.equal(value, contents[1]["state_dict"][weight]), weight
    net = load(resumed, trusted=["mine"]).net
    assert type(net).__name__ == network
    assert net.config["schedule"] == f"mine.{name}"
    assert {type(connection).__name__ for connection in net.connections} == {name}
    if network != "MAE":
        sample(monkeypatch, tmp_path, "--trust=mine", "--ckpt", resumed, "--num", "2", "--steps", "1", "--out", "a.npz")
        assert pixels(tmp_path / "a.npz").shape == (2, 8, 8, 1)
    probing = ["--max-train", "60", "--max-test", "40", "--out", "probes", *(["--times", "0.1"] * (network != "MAE"))]
    evaluate(monkeypatch, tmp_path, "probe", "--trust=mine", "--ckpt", resumed, *probing)
    assert (tmp_path / "probes" / "probes.json").is_file()


def test_a_file_with_a_connection_of_ones_own_needs_trust_and_fits_no_other_layout(
    mine, tmp_path, monkeypatch, capsys, caplog
):
    (tmp_path / "mine.py").write_text(code(TITLE))
    flags = ["--trust=mine", "--model.net.schedule=mine.Highway", "--trainer.callbacks+=Summary"]
    file = fit(monkeypatch, tmp_path, "own", 1, *flags)
    assert re.search(r"sample\.py --ckpt \S+ --trust mine", caplog.text)

    def export(*words):
        monkeypatch.setattr("sys.argv", ["uvit-decay", "export", str(file), *words])
        main()

    export("own.safetensors", "--trust=mine")
    for words in (["own.pth", "--trust=mine"], ["folder", "--to=diffusers"]):
        find_line(refused(capsys, export, *words), "mine.Highway", ".safetensors")
    sys.modules.pop("mine")
    for source in (file, "own.safetensors"):
        line = refused(capsys, sample, monkeypatch, tmp_path, "--ckpt", source, "--num", "2", "--out", "a.npz")
        find_line(line, source, "mine.Highway", "--trust mine.Highway")


class TwoHeights(Connection):
    def read(self, state):
        return state[:, :1]

    def end(self, state):
        return state

    def forward(self, state, output, keep=None):
        return state + output


class Unused(Connection):
    def __init__(self, branch, plan):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(plan.width))

    def forward(self, state, output, keep=None):
        return state + self.weight * output


class Nowhere(Unused):
    def forward(self, state, output, keep=None):
        return state + output


class Rescaled(Connection):
    def __init__(self, branch, plan):
        super().__init__()
        if branch < plan.branches:
            self.scale = torch.nn.Parameter(torch.full((plan.width,), 2.0))

    def rescale(self, normed):
        return self.scale * normed

    def forward(self, state, output, keep=None):
        return state + output


MISTAKES = [
    (TwoHeights, ("read", "branch 0")),
    (Unused, ("weight", "branch 8")),
    (Nowhere, ("weight", "branch 0")),
]


@pytest.mark.parametrize(("kind", "named"), MISTAKES)
def test_what_a_class_does_wrong_is_one_line_with_the_class_and_the_branch(kind, named):
    with raises_user_error(kind.__name__, *named):
        ViT(16, 4, 3, 16, 4, 2, schedule=kind)


def test_a_connection_may_change_the_output_of_the_norm():
    net = ViT(16, 4, 3, 16, 4, 2, schedule=Rescaled)
    seen = []
    net.blocks[0].norm1.register_forward_hook(lambda *call: seen.append(call[-1]))
    net.blocks[0].attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net.pooled(torch.randn(1, 3, 16, 16))
    assert torch.equal(seen[1], 2 * seen[0])


def test_connections_can_be_built_for_inference():
    with torch.inference_mode():
        assert ViT(16, 4, 3, 16, 4, 2, schedule="hyper-2").pooled(torch.randn(1, 3, 16, 16)).isfinite().all()


def reference(connections, tokens, branches):
    """Return the tokens after hyper-connections (Eq. 2 to 6 of the paper, static), with streams as rows of a matrix."""
    streams = torch.stack([tokens] * 2)
    for connection, branch in zip(connections, branches, strict=False):
        matrix = torch.zeros(3, 3, dtype=tokens.dtype)  # HC = [[0, B], [A_m, A_r]]
        matrix[0, 1:], matrix[1:, 0], matrix[1:, 1:] = connection.writes, connection.reads, connection.mixes
        h, *mixed = torch.einsum("sk,s...->k...", matrix[1:], streams)
        streams = torch.stack(mixed) + torch.einsum("k,...->k...", matrix[0, 1:], branch(h))
    return streams.mean(dim=0)


def test_hyper_connections_compute_the_papers_equations():
    torch.manual_seed(0)
    plan = Plan((0.0,) * 5, width=8)
    connections = torch.nn.ModuleList(HyperConnection.build(plan)).double()
    for parameter in connections.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randn(2, 3, 8, dtype=torch.float64)
    maps = [torch.nn.Linear(8, 8).double() for _ in range(5)]
    state = connections[0].start(tokens)
    for connection, branch in zip(connections, maps, strict=False):
        state = connection(state, branch(connection.read(state)))
    torch.testing.assert_close(connections[-1].end(state), reference(connections, tokens, maps), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "build",
    [
        lambda **options: UViT(8, 2, 1, 16, 4, 2, zero_init=False, **options),
        lambda **options: SiT(8, 2, 1, 16, 4, 2, wiring="decayed", **options),
        lambda **options: MAE(
            8, 2, 1, 16, 4, 2, decoder_dim=16, decoder_depth=1, decoder_heads=2, pixels="unit", **options
        ),
    ],
)
def test_hyper_connections_start_as_the_plain_network(build):
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    net = build(schedule="hyper-2")
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, net.get_parameter(name))
        torch.nn.init.normal_(parameter, std=0.1)
    net.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 1, 8, 8)
    arguments = (x, torch.rand(2, 16)) if isinstance(net, MAE) else (x, torch.tensor([0.2, 0.9]))
    outputs = [other(*arguments) for other in (plain, net)]
    if isinstance(net, MAE):
        outputs = [prediction for prediction, _ in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)


def test_hyper_connections_start_from_the_weights_of_a_plain_network(tmp_path, monkeypatch):
    plain = fit(monkeypatch, tmp_path, "plain", 1, "--model.net.alpha_min=1")
    options = ["--model.net.schedule=hyper-2", f"--model.init_from={plain}", "--model.optim.lr=1e-12"]
    file = fit(monkeypatch, tmp_path, "hyper", 1, *options)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([0.2, 0.9])
    outputs = [load(path).net(x, t) for path in (plain, file)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
