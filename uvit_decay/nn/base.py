"""Base class of the networks: decay in the state_dict, execution of the blocks, null label, folders of the Hub.

A folder, on disk or on the Hugging Face Hub, contains model.safetensors, with checksums, and config.json, the
constructor's arguments. It records neither a noise path nor a prediction. `uvit-decay export` writes a folder that can
generate images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, get_type_hints, runtime_checkable

import torch
from huggingface_hub import PyTorchModelHubMixin
from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from uvit_decay import decay
from uvit_decay.decay.connection import Connection, check_connections
from uvit_decay.files.tensor_files import load_tensors, save_tensors
from uvit_decay.nn.long_skips import LongSkips, SkipPlan, build_long_skips
from uvit_decay.nn.output_skip import OutputSkip
from uvit_decay.nn.recorded import check_recorded
from uvit_decay.terminal.errors import UserError, explain


class DataLayers(NamedTuple):
    """Names of the weights that depend on the data set, for fine-tuning on another one.

    Args:
        pixels: modules that read or write the channels of patches.
        positions: embeddings of the positions [prefix tokens, patches]; fixed embeddings need no gradient.
        labels: label table, one row per class and then the null label; None for a network without labels.
        label_bias: bias to which the label's embedding is added; None if the label is a token.
    """

    pixels: tuple[str, ...]
    positions: tuple[str, ...]
    labels: str | None = None
    label_bias: str | None = None


class ImageNetwork(Protocol):
    """Network that tasks train and checkpoints rebuild: an nn.Module with these attributes.

    A denoiser net(x, t, y) takes images x (b, c, h, w) of about [-1, 1], times t (b,) in [0, 1] with t = 1 noise, and
    labels y (b,) int64, or None for no label. It returns (b, c, h, w). A classifier net(x) returns logits. The features
    of a network with `uvit_decay.nn.intermediates.HasIntermediates` can be probed.
    """

    image_size: int
    """Height and width of the images, in pixels or latent cells."""

    channels: int
    """Channels of the images: 3 for RGB, 1 for grey, 4 for the latents of most autoencoders."""

    num_classes: int
    """Number K of classes, whose labels are 0 to K - 1; 0 for a network without labels."""

    null_label: bool
    """True if the network has the label K, "no label", which label dropout trains and guidance needs."""

    config: dict
    """The constructor's arguments as plain values, from which a checkpoint rebuilds the network."""


def check_attributes(net: nn.Module, what: str) -> None:
    """Raise a UserError that begins with `what` if the network lacks attributes of `ImageNetwork`."""
    missing = []
    for name, kind in get_type_hints(ImageNetwork).items():
        if not isinstance(getattr(net, name, None), kind):
            missing.append(name)
    if missing:
        raise UserError(
            f"{what}, which is not an image network: it has no {', '.join(missing)}; "
            "see docs/extending.md and uvit_decay.nn.base.ImageNetwork"
        )


@runtime_checkable
class HasDataLayers(Protocol):
    """Network that names the weights that depend on the data set; a label token is its first prefix token."""

    data_layers: DataLayers


class Rows(NamedTuple):
    """A range of the rows (outputs) of a linear layer's weight and bias.

    Args:
        module: name of the module.
        part: index of the part, from 0.
        parts: number of equal parts into which the rows are divided; 1 means all rows.
    """

    module: str
    part: int = 0
    parts: int = 1


@runtime_checkable
class Residual(Protocol):
    """Block that names the last layers of its branches, in execution order.

    If the branches are multiplied by gates, `gates` are the rows that compute them; otherwise it is empty.
    """

    last_layers: tuple[str, ...]
    gates: tuple[Rows, ...]


class DecayedNet(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="uvit_decay",
    paper_url="https://arxiv.org/abs/2404.10947",
    tags=["decayed-identity-shortcuts"],
):
    """Network with decayed shortcuts (abstract); a transformer of L blocks has 2 L residual branches.

    `from_pretrained`, `save_pretrained` and `push_to_hub` are huggingface_hub's. Subclasses set `num_classes`,
    `null_label`, `checkpointing`, `dim` and `config` (the constructor's arguments), and call `record_shortcuts` and
    then, with initialised weights, `connect`.
    """

    config: dict[str, Any]
    # Not None, so that no network is built with a second copy of its arguments in it.
    _hub_mixin_config: ClassVar[dict[str, Any]] = {}
    num_classes: int
    null_label: bool
    checkpointing: bool
    dim: int
    class_token = False  # whether token 0 is a class token
    times_checked = False  # whether a call has compared the values of t with [0, 1], see `uvit_decay.nn.inputs`
    shortcuts: decay.Shortcuts
    long_skips: LongSkips | None  # factors of the long skips, None where they are plain
    output_skip: OutputSkip | None  # from the input of a denoiser to its output, None for a plain one
    merges: tuple[decay.Merge, ...]  # of long skips into the decayed stream
    connections: Sequence[Connection]  # of all branches, and one for the output

    def save_pretrained(self, save_directory: str | Path, *, config: Any = None, **options: Any) -> str | None:
        """Write config.json, model.safetensors and README.md; other options are huggingface_hub's."""
        if "." in self.shortcuts.name:  # a class of connections; `from_pretrained` finds only entries of the table
            raise UserError(f"a folder cannot hold the code of {self.shortcuts.name}: export a .safetensors file")
        return super().save_pretrained(save_directory, config=config or self.config, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the weights with checksums; huggingface_hub's own method writes none."""
        weights = {name: tensor.cpu() for name, tensor in self.state_dict().items()}
        save_tensors(save_directory / SAFETENSORS_SINGLE_FILE, weights, {"format": "pt"})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> nn.Module:
        """Return the network stored in a folder or a repository, in eval mode.

        Arguments of the constructor among `options` replace the stored ones.

        Raises:
            UserError: the files cannot be read or are damaged, a weight is missing or unexpected, or the alphas are of
                another decay.
        """
        options["strict"] = True
        what = f"cannot load a {cls.__name__} from {pretrained_model_name_or_path}"
        # Any exception is explained, because a damaged file may raise any of them.
        with explain(what, Exception):
            try:
                loaded = super().from_pretrained(pretrained_model_name_or_path, **options)
            except UserError as error:  # of the constructor or the weights, which do not know the place
                raise UserError(f"{what}: {error}") from error
            return loaded.eval()  # huggingface_hub 0.34 leaves it in training mode

    @classmethod
    def _load_as_safetensor(cls, model: nn.Module, model_file: str, map_location: str, strict: bool) -> nn.Module:
        """Load the weights of a file after a comparison with its checksums, if it has any."""
        _, weights = load_tensors(Path(model_file))
        model.load_state_dict(weights, strict=strict)
        return model.to(map_location)

    def record_shortcuts(self, shortcuts: decay.Shortcuts) -> None:
        """Register the weights of the branches in the state_dict; loading compares them.

        If the schedule is a function, the numbers that it returned are stored in `config`. A checkpoint can then be
        read without the function.
        """
        self.shortcuts = shortcuts
        self.long_skips = None
        self.output_skip = None
        self.merges = ()
        if shortcuts.name:
            self.config["schedule"] = shortcuts.name
        elif not isinstance(self.config["schedule"], str):
            pairs = zip(shortcuts.alphas, shortcuts.betas, strict=True)
            self.config["schedule"] = [list(pair) for pair in pairs]
        shortcuts.register(self, self.dim)
        self.register_load_state_dict_pre_hook(_check_weights)
        # Places in the order of the parameters, by which optimizers store moments; `connect` fills them.
        self.depth_attention = self.connections = nn.ModuleList()

    @torch.inference_mode(False)  # the check needs gradients
    def connect(self, has_time: bool = False) -> None:
        """Build the connections of the branches, and hand them to their blocks.

        Call it after the weights are initialised, because connections may draw random numbers. They are modules of this
        network and not of its blocks, whose shards FSDP frees between calls. With `has_time`, `run_blocks` gets the
        embedded time.
        """
        connections = self.shortcuts.connections(self, self.dim)
        if self.shortcuts.build is not None:
            try:
                check_connections(connections, self.dim, has_time)
            except UserError as error:
                raise UserError(f"the schedule {self.shortcuts.name}: {error}") from error
        self.connections = nn.ModuleList(connections)
        shared = connections[0].shared
        for name, module in shared.items():
            self.add_module(name, module)
        if "depth_attention" not in shared:
            del self.depth_attention
        of_branches = iter(connections)
        for block in self.find_decayed_blocks().values():
            block.connections = tuple(islice(of_branches, len(block.last_layers)))

    def record_long_skips(self, plan: SkipPlan) -> None:
        """Build the factors of the long skips (`skip_scale`); they are in the state_dict unless all are 1.

        Call it after the weights are initialised, because gates keep torch's initialisation as in ScaleLong's code.
        """
        self.long_skips = build_long_skips(self.config, self.shortcuts, plan)
        self.merges = tuple(decay.Merge(2 * block, plan.boundary) for block in plan.merges)

    def branch_ends(self) -> list[str]:
        """Return the names of the last layers of the decayed branches, in execution order."""
        ends = []
        for name, block in self.find_decayed_blocks().items():
            ends += [f"{name}.{layer}" for layer in block.last_layers]
        return ends

    def branch_factors(self) -> list[Rows]:
        """Return the rows to which the output of each decayed branch is proportional, in execution order.

        If a branch has a gate (adaLN-Zero), they are the rows of the gate. Otherwise they are its last layer. A
        silenced branch (`silence`) has 0 in these rows, so it starts to learn through them.
        """
        factors = []
        for name, block in self.find_decayed_blocks().items():
            rows = block.gates or [Rows(layer) for layer in block.last_layers]
            factors += [part._replace(module=f"{name}.{part.module}") for part in rows]
        return factors

    def find_decayed_blocks(self) -> dict[str, nn.Module]:
        """Return the decayed blocks by name in execution order, which is the order of registration."""
        blocks = {}
        for name, block in self.named_modules():
            if isinstance(block, Residual):
                blocks[name] = block
        first = next(iter(blocks.values()))
        count = len(self.shortcuts.alphas) // len(first.last_layers)
        return dict(islice(blocks.items(), count))  # leaves out the decoder of an MAE, which comes last

    def silence(self, blocks: Sequence[nn.Module]) -> None:
        """Zero the last layers of the branches of `blocks`, so that the outputs of the branches start at 0.

        Betas that start at 0 (ReZero) silence the branches already. With both at 0 neither would get a gradient.
        """
        if any(self.shortcuts.betas):
            for block in blocks:
                block.zero_init()

    def run_blocks(
        self,
        tokens: Tensor,
        blocks: Sequence[nn.Module],
        skips: int = 0,
        *conditions: Tensor,
        layers: Collection[int] | None = None,
        keep: Tensor | None = None,
        time: Tensor | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (layer, tokens) for some layers, 0 after the embeddings and i after block i, and for the last one.

        Args:
            tokens: embedded tokens (b, n, d).
            blocks: blocks in execution order.
            skips: number of long skips. The last `skips` blocks read the tokens after the first ones, last in, first
                out.
            conditions: further inputs of every block.
            layers: the layers whose tokens are yielded, None for all; the last one always is.
            keep: factors (2 L, b) of the outputs of all branches, for stochastic depth.
            time: embedded time (b, d) for connections that use it.
        """
        wanted = range(len(blocks)) if layers is None else layers
        if 0 in wanted:
            yield 0, tokens
        state = self.connections[0].start(tokens, time)
        first_reader = len(blocks) - skips
        unread: list[Tensor] = []  # tokens for the long skips, a stack: the last ones are read first
        for k, block in enumerate(blocks):
            inputs: dict[str, Any] = {}
            if keep is not None:
                inputs["keep"] = keep[2 * k : 2 * k + 2, :, None, None]
            if k >= first_reader:
                inputs["skip"] = unread.pop()
                if self.long_skips is not None:
                    # Numbers are constants of a graph, which equal blocks share: compiled blocks get tensors.
                    compiled = block._compiled_call_impl is not None
                    inputs["merge"] = self.long_skips(k - first_reader, inputs["skip"], compiled)
            state = self.run_block(block, state, *conditions, **inputs)
            layer = k + 1
            if k < skips or layer in wanted or layer == len(blocks):
                tokens = self.connections[2 * layer].end(state)
            if k < skips:
                unread.append(tokens)
            if layer in wanted or layer == len(blocks):
                yield layer, tokens

    def run_block(self, block: nn.Module, *inputs: object, **options: object) -> Tensor:
        """Return block(*inputs, **options).

        With `checkpointing`, training recomputes the block in the backward pass instead of storing its activations.
        """
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False, **options)
        return block(*inputs, **options)

    def null_labels(self, count: int, device: torch.device) -> Tensor:
        """Return the null label `count` times, (count,) int64; raise a UserError if the network has no null label."""
        if not self.null_label:
            raise UserError("this network was trained without a null label; give a class for each image")
        return torch.full((count,), self.num_classes, dtype=torch.int64, device=device)


def _check_weights(net: DecayedNet, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Raise a UserError if the weights were trained with another decay (hook before a state_dict is loaded).

    Official files hold no alphas. They load into a network of any decay, whose own weights of the branches and factors
    of the long skips are added. A learned output skip starts without effect.
    """
    shortcuts = net.shortcuts
    if prefix + "alphas" not in state:
        if net.long_skips is not None and not net.long_skips.gates:
            state[f"{prefix}long_skips.scales"] = net.long_skips.scales
        if net.output_skip is not None:
            for name, value in net.output_skip.state_dict().items():
                state[f"{prefix}output_skip.{name}"] = torch.zeros_like(value)
        for name in shortcuts.recorded:
            state[prefix + name] = shortcuts.tensor(name, net.dim)
    options = "`alpha_min`, `schedule`, `granularity`, `index` and `branches`"
    for name in shortcuts.recorded:
        if name != shortcuts.learned:
            check_recorded(name, state.get(prefix + name), getattr(shortcuts, name), options)
