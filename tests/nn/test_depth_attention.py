"""Attention over depth: values against the equations, identities, gradients, and what refuses it."""

import copy

import pytest
import torch
from mae_reference import SMALL as SMALL_MAE
from networks import CONCAT_SIT, DECAYED_SIT, MASKED, SIT, UVIT, VIT, sources_of, watch
from torch import nn
from torch.autograd import gradcheck

from uvit_decay.decay import SHORTCUTS, Plan, attach, mixing_matrix, shortcuts
from uvit_decay.decay.depth_attention import SHARED, DepthReader, Source, Sources
from uvit_decay.files.instantiate import Spec, build
from uvit_decay.nn import MAE, ResNet, ViT
from uvit_decay.terminal.errors import UserError

BRANCHES, DIM = 6, 5
DENOISERS = (UVIT, SIT, DECAYED_SIT, CONCAT_SIT)
KINDS = (*DENOISERS, MASKED, VIT)
PLAN = Plan((0.0,) * BRANCHES, width=DIM)
ROUTINGS = {}  # by the name of the schedule
for name, entry in SHORTCUTS.items():
    if name.startswith(("attnres", "dar")):
        ROUTINGS[name] = entry.build(PLAN)[0].shared[SHARED].kind
each_schedule = pytest.mark.parametrize("schedule", ROUTINGS)


def fitting(kind):
    """Return the schedules of a network: those with time need a denoiser."""
    return [name for name, routing in ROUTINGS.items() if kind in DENOISERS or not routing.time]


EVERY = [(kind, schedule) for kind in KINDS for schedule in fitting(kind)]
every = pytest.mark.parametrize(("kind", "schedule"), EVERY, ids=lambda value: getattr(value, "name", value))


def reader(kind, std, branches=BRANCHES):
    torch.manual_seed(1)
    found = DepthReader(kind, branches, DIM).double()
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=std)
    return found


def values(branches=BRANCHES):
    torch.manual_seed(0)
    return torch.randn(branches + 1, 2, 3, DIM, dtype=torch.float64)


def states(found, outputs, time=None):
    """Return the inputs of all readers but the first, given the embeddings and the outputs of branches."""
    sources, rows = Sources(found.kind, len(outputs) - 1, time, (Source.of(outputs[0], (0,)),)), []
    for output in outputs[1:]:
        sources = sources.add_branch(output)
        rows.append(found(sources))
    return torch.stack(rows)


def seen_by(kind, reader, v):
    """Return the sources of a reader, 2..N + 1, written again from the papers."""
    done, s = reader - 1, kind.group
    whole = (done - (reader == len(v))) // s  # the output sees the last group as it is while it runs
    if kind.sums:
        whole = done // s
        groups = [v[1 + n * s : 1 + (n + 1) * s].sum(0) for n in range(whole)]
        running = [v[1 + whole * s : 1 + done].sum(0)] if done > whole * s else []
        return [v[0], *groups, *running]
    return [v[0], *(v[n * s] for n in range(1, whole + 1)), *v[1 + whole * s : 1 + done]]


@pytest.mark.parametrize("branches", [BRANCHES, 8])  # the last group is incomplete, or complete
@each_schedule
def test_readers_compute_the_equations(schedule, branches):
    kind, v, time = ROUTINGS[schedule], values(branches), torch.randn(2, DIM, dtype=torch.float64)
    found = reader(kind, 0.7, branches)
    for i, row in enumerate(states(found, v, time if kind.time else None)):
        query = found.queries[i]
        seen = torch.stack(seen_by(kind, i + 2, v))
        q = query.query + (query.time * time if kind.time else 0)
        normed = torch.nn.functional.rms_norm(seen, (DIM,), query.norm, 1e-6)
        logits = torch.einsum("sbnd,bd->sbn", normed, q.expand(2, DIM)) * (DIM**-0.5 if kind.scaled else 1)
        expected = (logits.softmax(dim=0)[..., None] * seen).sum(0)
        torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-10)


@each_schedule
def test_queries_of_zero_and_equal_logits_give_the_mean_of_the_sources(schedule):
    kind, v = ROUTINGS[schedule], values()
    time = torch.ones(2, DIM, dtype=torch.float64)
    start = DepthReader(kind, BRANCHES, DIM).double()
    for i, row in enumerate(states(start, v, time if kind.time else None)):
        torch.testing.assert_close(row, torch.stack(seen_by(kind, i + 2, v)).mean(0))
    equal = v[:1].expand(BRANCHES + 1, -1, -1, -1)  # equal sources have equal logits, whatever the query
    if not kind.sums or kind.group == 1:
        rows = states(reader(kind, 0.7), equal, time if kind.time else None)
        torch.testing.assert_close(rows, equal[1:])


@each_schedule
def test_gradients_are_those_of_finite_differences(schedule):
    kind = ROUTINGS[schedule]
    found = reader(kind, 0.5)
    time = torch.randn(2, DIM, dtype=torch.float64) if kind.time else None
    parameters = list(found.parameters())
    outputs = values()[:, :1, :2].clone().requires_grad_()
    time = None if time is None else time[:1]

    def function(outputs, *_):
        return states(found, outputs, time)

    assert gradcheck(function, (outputs, *parameters), eps=1e-6, atol=1e-6)


@every
def test_networks_read_what_their_matrix_says_and_train_all_queries(kind, schedule):
    """With queries of 0 the weights are equal for all tokens, so the matrix is exact."""
    torch.manual_seed(0)
    net = kind.loaded(schedule=schedule).double() if kind in (MASKED, VIT) else kind.small(schedule=schedule).double()
    body = net.net if kind is MASKED else net
    for name, parameter in net.named_parameters():
        if "depth_attention" not in name:
            nn.init.normal_(parameter, std=0.2)
    arguments = [x.double() if x.is_floating_point() else x for x in kind.inputs()]
    arguments = arguments[:1] if kind is VIT else arguments
    seen = watch(body)
    with torch.no_grad():
        matrix = mixing_matrix(body, *arguments)
    assert len(seen["gates"]) in (0, len(seen["branches"]) // 2), "once for both branches of a block"
    found = torch.einsum("ls,sbnd->lbnd", matrix[:-1], sources_of(seen))
    torch.testing.assert_close(found, torch.stack(seen["inputs"]), rtol=1e-9, atol=1e-9)
    net(*arguments).square().mean().backward()
    assert all(query.query.grad.abs().max() > 0 for query in body.depth_attention.queries)
    assert all(query.time is None or query.time.grad.abs().max() > 0 for query in body.depth_attention.queries)


@every
def test_queries_are_recorded_and_blocks_may_be_recomputed(kind, schedule):
    make = kind.loaded if kind in (MASKED, VIT) else kind.small
    net, arguments = make(schedule=schedule).train(), kind.inputs()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    body = net.net if kind is MASKED else net
    again = build(Spec.of(type(body), body.config), type(body), "uvit_decay.nn")
    again.load_state_dict(body.state_dict())
    recomputed = make(schedule=schedule, checkpointing=True).train()
    recomputed.load_state_dict(net.state_dict())
    outputs = net(*arguments), recomputed(*arguments)
    for output in outputs:
        output.square().mean().backward()
    torch.testing.assert_close(*outputs)
    for (name, parameter), other in zip(net.named_parameters(), recomputed.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")
    with pytest.raises((UserError, RuntimeError), match="depth_attention"):
        make().load_state_dict(net.state_dict())
    with pytest.raises((UserError, RuntimeError), match="depth_attention"):
        make(schedule=schedule).load_state_dict(make().state_dict())


def test_queries_keep_their_place_among_the_parameters_by_which_optimizers_store_moments():
    net = ViT(image_size=8, patch_size=4, dim=16, depth=2, heads=2, num_classes=3, schedule="attnres-2")
    modules = dict.fromkeys(name.split(".")[0] for name, _ in net.named_parameters())
    assert list(modules)[-4:] == ["blocks", SHARED, "norm", "head"]


def test_stochastic_depth_drops_the_branch_of_its_row():
    torch.manual_seed(0)
    net = ViT(16, 4, 3, 16, 2, 2, num_classes=3, schedule="attnres").eval()
    x = torch.randn(2, 3, 16, 16)
    for i, end in enumerate(net.branch_ends()):
        keep = torch.ones(4, 2)
        keep[i] = 0
        silent = copy.deepcopy(net)
        for parameter in silent.get_submodule(end).parameters():
            nn.init.zeros_(parameter)
        assert torch.equal(net(x, keep), silent(x))


@each_schedule
def test_what_does_not_fit_is_one_line(schedule):
    for options in (dict(alpha_min=0.7), dict(alpha_min=1.0, branches="mlp")):
        with pytest.raises(UserError, match=schedule):
            shortcuts(2, schedule=schedule, **options)
    with pytest.raises(UserError, match=schedule):
        UVIT.small(schedule=schedule, skip_scale="stream:0.8")
    with pytest.raises(UserError, match=schedule):
        ResNet(32, width=8, stem="cifar", schedule=schedule)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    with pytest.raises(UserError, match=schedule):
        attach(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 1.0, schedule)
    with pytest.raises(UserError, match=schedule):
        mixing_matrix(shortcuts(2, 1.0, schedule))


def test_a_network_without_time_refuses_queries_of_time():
    for make in (lambda: ViT(16, 4, 3, 16, 2, 2, schedule="dar-t"), lambda: MAE(**SMALL_MAE, schedule="dar-t")):
        with pytest.raises(UserError, match="dar-t"):
            make()
