"""Compilation of a network in place, as a whole or block by block."""

from __future__ import annotations

import torch
from torch import nn

from uvit_decay.nn.intermediates import layer_blocks


def compile_net(net: nn.Module, backend: str, by_block: bool) -> None:
    """Compile the network in place, before `shard`, as a whole or `by_block`.

    Equal blocks share their graphs, so that compilation by block takes a fraction of the time. Graphs cannot gather
    shards, so that a network that will be sharded is compiled by block. On a CPU one graph of the whole network is
    faster.

    Training, validation and sampling need separate graphs: with and without gradients, with and without autocast, for
    the first batch size, any other, small ones, and one image. torch limits a function to 8 graphs, and runs further
    ones uncompiled. Blocks share this limit, and different blocks have separate graphs. So the limit is raised here.

    Args:
        net: the network.
        backend: name of a backend of torch.compile.
        by_block: compile each block; networks without known blocks are compiled as a whole.
    """
    kinds = {type(block) for block in layer_blocks(net)}
    parts = [net]
    if by_block and kinds:
        parts = [part for part in net.modules() if type(part) in kinds]
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 16 * len(parts))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
    for part in parts:
        part.compile(backend=backend)
