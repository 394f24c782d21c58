"""Base class of the networks: the decay in the state_dict, the run of the blocks, the null label, folders.

A folder, on disk or on the Hugging Face Hub, has config.json, the arguments of the constructor, and model.safetensors.
It says nothing of a noise path or a prediction: `uvit-decay export` writes one that makes images by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, get_type_hints, runtime_checkable

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from uvit_decay import decay
from uvit_decay.nn.depth_attention import DepthReader, Sources
from uvit_decay.nn.long_skips import LongSkips, SkipPlan, build_long_skips
from uvit_decay.runtime.errors import UserError, check_numbers, check_whole, explained


class DataLayers(NamedTuple):
    """Names in the state_dict of what depends on the data, for networks that start from weights of other data.

    Args:
        pixels: modules that read or write the channels of patches.
        positions: embeddings of the positions [prefix tokens, patches]; fixed ones need no gradient.
        labels: the table with a row for each class and then the null label; None for a network without labels.
        label_bias: a bias to which the vector of the label is added; None if the label is a token.
    """

    pixels: tuple[str, ...]
    positions: tuple[str, ...]
    labels: str | None = None
    label_bias: str | None = None


class ImageNetwork(Protocol):
    """Network that tasks train and checkpoints rebuild, an nn.Module with these attributes.

    A denoiser is called as net(x, t, y) with images x (b, c, h, w) of about [-1, 1], times t (b,) in [0, 1], of which 1
    is noise, and labels y (b,) int64 or None for no label; it returns (b, c, h, w). A classifier net(x) returns logits.
    With `uvit_decay.nn.intermediates.HasIntermediates` its features can be probed.
    """

    image_size: int
    """Height and width of the images, in pixels or latent cells."""

    channels: int
    """Channels of the images: 3 for RGB, 1 for grey, 4 for the latents of most autoencoders."""

    num_classes: int
    """Number K of classes, whose labels are 0 to K - 1; 0 for a network without labels."""

    null_label: bool
    """Whether it takes the label K, "no label", which label dropout trains and guidance needs."""

    config: dict
    """The arguments of its constructor as plain values, from which a checkpoint rebuilds it."""


def check_attributes(net: nn.Module, what: str) -> None:
    """Raise a UserError that begins with `what` if the network lacks attributes of `ImageNetwork`."""
    wanted = get_type_hints(ImageNetwork).items()
    if missing := [name for name, kind in wanted if not isinstance(getattr(net, name, None), kind)]:
        lacks = f"it has no {', '.join(missing)}: see docs/extending.md and uvit_decay.nn.base.ImageNetwork"
        raise UserError(f"{what}, which is no network of images: {lacks}")


@runtime_checkable
class HasDataLayers(Protocol):
    """Network that says which of its weights depend on the data; a label comes first among its prefix tokens."""

    data_layers: DataLayers


@runtime_checkable
class Residual(Protocol):
    """A block that names the last layers of its branches, in execution order."""

    last_layers: tuple[str, ...]


class Rows(NamedTuple):
    """Some of the rows, or outputs, of the weight and the bias of a module.

    Args:
        module: name of the module.
        part: which of the equal parts these rows are, from 0.
        parts: number of equal parts; 1 stands for all rows.
    """

    module: str
    part: int = 0
    parts: int = 1


@runtime_checkable
class HasGates(Protocol):
    """A block whose branches end in products with gates: it names the rows that compute them, in execution order."""

    gates: tuple[Rows, ...]


class DecayedNet(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="uvit_decay",
    paper_url="https://arxiv.org/abs/2404.10947",
    tags=["decayed-identity-shortcuts"],
):
    """A network whose residual branches stand on decayed shortcuts (abstract): 2 L of a transformer of L blocks.

    It has `from_pretrained`, `save_pretrained` and `push_to_hub` of huggingface_hub. Subclasses set `num_classes`,
    `null_label`, `checkpointing`, `dim` and `config`, the arguments of their constructor, and call `record_shortcuts`.
    """

    config: dict[str, Any]
    # Not None, so that no network is built with a second copy of its arguments in it.
    _hub_mixin_config: ClassVar[dict[str, Any]] = {}
    num_classes: int
    null_label: bool
    checkpointing: bool
    dim: int
    class_token = False  # whether the first token is one
    shortcuts: decay.Shortcuts
    long_skips: LongSkips | None  # factors of the long skips, None where they are plain
    merges: tuple[decay.Merge, ...]  # of long skips into the decayed stream
    depth_attention: DepthReader | None  # in place of the shortcuts

    def save_pretrained(self, save_directory: str | Path, *, config: Any = None, **options: Any) -> str | None:
        """Write config.json, model.safetensors and README.md; the options are huggingface_hub's."""
        return super().save_pretrained(save_directory, config=config or self.config, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> nn.Module:
        """Return the network of a folder or a repository, in eval mode; arguments replace those that are stored.

        A missing or a superfluous weight, and alphas of another decay, are refused.
        """
        # Any error is explained: a damaged file may raise anything.
        with explained(f"cannot load a {cls.__name__} from {pretrained_model_name_or_path}", Exception):
            loaded = super().from_pretrained(pretrained_model_name_or_path, **{**options, "strict": True})
            return loaded.eval()  # huggingface_hub 0.34 leaves it in training mode

    def record_shortcuts(self, shortcuts: decay.Shortcuts) -> None:
        """Register the weights of the branches in the state_dict, where loading checks them.

        If the schedule is a function, `config` gets the numbers it returned, so that a checkpoint is read without it.
        """
        self.shortcuts = shortcuts
        self.long_skips, self.merges, self.depth_attention = None, (), None
        if shortcuts.depth is not None:
            self.depth_attention = DepthReader(shortcuts.depth, len(shortcuts.alphas), self.dim)
        if not isinstance(self.config["schedule"], str):
            self.config["schedule"] = [list(pair) for pair in zip(shortcuts.alphas, shortcuts.betas, strict=True)]
        decay.register_weights(self, shortcuts, self.dim)
        self.register_load_state_dict_pre_hook(_check_weights)

    def record_long_skips(self, plan: SkipPlan) -> None:
        """Build the factors of the long skips (`skip_scale`), which are part of the state_dict unless they are 1.

        Call it after the weights are initialised: gates keep torch's initialisation, as in ScaleLong's code.
        """
        self.long_skips = build_long_skips(self.config, self.shortcuts, plan)
        self.merges = tuple(decay.Merge(2 * block, plan.boundary) for block in plan.merges)

    def branch_ends(self) -> list[str]:
        """Return the names of the last layers of the decayed branches, in execution order."""
        return [f"{name}.{end}" for name, block in self.decayed_blocks().items() for end in block.last_layers]

    def branch_factors(self) -> list[Rows]:
        """Return the rows to which the output of each decayed branch is proportional, in execution order.

        They are the gate of a branch that has one (adaLN-Zero), and otherwise its last layer. With `silence` they start
        at 0, so that a branch begins to move with them.
        """
        found = []
        for name, block in self.decayed_blocks().items():
            rows = block.gates if isinstance(block, HasGates) else [Rows(end) for end in block.last_layers]
            found += [part._replace(module=f"{name}.{part.module}") for part in rows]
        return found

    def decayed_blocks(self) -> dict[str, nn.Module]:
        """Return the decayed blocks by name in execution order, in which networks register them."""
        found = {name: block for name, block in self.named_modules() if isinstance(block, Residual)}
        each = len(next(iter(found.values())).last_layers)
        return dict(islice(found.items(), len(self.shortcuts.alphas) // each))  # an MAE's decoder comes last

    def silence(self, blocks: Sequence[nn.Module]) -> None:
        """Zero the last layers of the branches of `blocks`, whose output then starts at 0.

        Branches whose betas start at 0 are silent already, and no gradient would reach either.
        """
        if any(self.shortcuts.betas):
            for block in blocks:
                block.zero_init()

    def run_blocks(
        self,
        tokens: Tensor,
        blocks: Sequence[nn.Module],
        skips: int,
        *conditions: Tensor,
        keep: Tensor | None = None,
        time: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield `tokens`, then the state after each block.

        The last `skips` blocks read the states after the first ones, last in, first out: a long skip at each height.
        `keep` (2 L, b) multiplies the output of every branch, for stochastic depth. `time` (b, d) is the embedded time
        for attention over depth, where the state after a block is what the next branch reads.
        """
        yield tokens
        if self.depth_attention is not None:
            yield from self._run_across(tokens, blocks, skips, conditions, keep, time)
            return
        unread: list[Tensor] = []
        for k, block in enumerate(blocks):
            inputs = [*conditions, *self._weights(k, keep, is_compiled(block))]
            skip = unread.pop() if k >= len(blocks) - skips else None
            if skip is not None and self.long_skips is not None:
                inputs.append(self.long_skips(k - len(blocks) + skips, skip, is_compiled(block)))
            tokens = self.run_block(block, tokens, skip, *inputs)
            if k < skips:
                unread.append(tokens)
            yield tokens

    def _run_across(
        self,
        tokens: Tensor,
        blocks: Sequence[nn.Module],
        skips: int,
        conditions: Sequence[Tensor],
        keep: Tensor | None,
        time: Tensor | None,
    ) -> Iterator[Tensor]:
        """Yield the state after each block with attention over depth, see `uvit_decay.nn.depth_attention`."""
        sources = Sources(self.depth_attention.kind, tokens, 2 * len(blocks))
        state, unread = tokens, []
        for k, block in enumerate(blocks):
            if k >= len(blocks) - skips:
                j, skip = k - len(blocks) + skips, unread.pop()
                merge = None if self.long_skips is None else self.long_skips(j, skip, is_compiled(block))
                sources.add_merge(self.run_block(block, state, skip, *conditions, merge=merge, part="merge"))
                state = self.depth_attention(sources, time)
            for branch, part in ((2 * k, "attention"), (2 * k + 1, "mlp")):
                output = self.run_block(block, state, None, *conditions, part=part)
                sources.add_branch(output if keep is None else output * keep[branch, :, None, None])
                state = self.depth_attention(sources, time)
            if k < skips:
                unread.append(state)
            yield state

    def measure_mixing(self, *inputs: Tensor) -> Tensor:
        """Return the mixing matrix of attention over depth on a batch, see `decay.mixing_matrix`."""
        return self.depth_attention.measure(self, inputs, len(self.merges))

    def _weights(self, k: int, keep: Tensor | None, as_tensors: bool) -> Iterator[Sequence[float | Tensor]]:
        """Return alphas, betas and scales of block k; see `decay.branch_weights` for `as_tensors`."""
        pair = [decay.branch_weights(self, self.shortcuts, i, as_tensors) for i in (2 * k, 2 * k + 1)]
        if keep is not None:
            kept = keep[2 * k : 2 * k + 2, :, None, None]
            pair = [branch._replace(beta=branch.beta * drawn) for branch, drawn in zip(pair, kept, strict=True)]
        return zip(*pair, strict=True)

    def run_block(self, block: nn.Module, *inputs: object, **options: object) -> Tensor:
        """Return block(*inputs, **options).

        With `checkpointing`, training recomputes the block in the backward pass instead of storing its activations.
        """
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False, **options)
        return block(*inputs, **options)

    def null_labels(self, count: int, device: torch.device) -> Tensor:
        """Return the null label `count` times, (count,) int64; raise a UserError if the network has none."""
        if not self.null_label:
            raise UserError("this network was trained without a null label: give it a class for each image")
        return torch.full((count,), self.num_classes, dtype=torch.int64, device=device)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise a UserError if a size among the arguments of a network is out of range."""
    names = ("image_size", "patch_size", "channels", "dim", "heads")
    check_whole(1, 2**16, **{name: config[name] for name in names})
    check_whole(1, 1000, depth=config["depth"])
    check_whole(0, 2**24, num_classes=config["num_classes"])
    check_numbers("(0, 1000]", mlp_ratio=config["mlp_ratio"])


def is_compiled(block: nn.Module) -> bool:
    """Return whether `block.compile()` was called, so that its call runs a graph, which all blocks alike share.

    Numbers are constants of a graph: with an alpha of its own each block would be compiled separately.
    """
    return block._compiled_call_impl is not None


def init_linears(net: nn.Module, init_weight: Callable[[Tensor], Any]) -> None:
    """Apply `init_weight` to the weight of every linear layer of `net` and zero the biases."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            init_weight(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _check_weights(net: DecayedNet, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Raise a UserError for weights of another decay.

    Official files hold no alphas; they load into a network of any decay.
    """
    official = prefix + "alphas" not in state
    if official and net.long_skips is not None and not net.long_skips.gates:
        state[f"{prefix}long_skips.scales"] = net.long_skips.scales
    for name in net.shortcuts.recorded:
        if official:
            state[prefix + name] = net.shortcuts.tensor(name, net.dim)
        if official or name == net.shortcuts.learned:
            continue
        expected, value = getattr(net.shortcuts, name), state.get(prefix + name, torch.empty(0))
        # Recorded in float32, then perhaps converted with the whole network.
        stored, rounding = value.tolist(), max(torch.finfo(value.dtype).eps, torch.finfo(torch.float32).eps)
        if len(stored) != len(expected) or any(
            abs(a - b) > rounding * max(1.0, abs(b)) for a, b in zip(stored, expected, strict=True)
        ):
            raise UserError(
                f"the weights were trained with {name} {_outline(stored)}, this network has {_outline(expected)}: "
                "set alpha_min, schedule, granularity, index and branches to match"
            )


def _outline(values: Sequence[float]) -> str:
    """Return the first, the middle and the last of `values` and their number, for error messages."""
    shown = [f"{values[i]:.4g}" for i in sorted({0, len(values) // 2, len(values) - 1})] if values else []
    return f"[{' .. '.join(shown)}] ({len(values)} branches)"
