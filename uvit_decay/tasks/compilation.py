"""Compilation of a network in place, as a whole or block by block."""

from __future__ import annotations

import torch
from torch import nn

from uvit_decay.nn.intermediates import layer_blocks


def compile_net(net: nn.Module, backend: str, by_block: bool) -> None:
    """Compile the network in place, before `shard`, as a whole or `by_block`.

    Blocks alike share their graphs, so that by block it takes a fraction of the time; graphs cannot gather shards, so
    that a network that will be sharded needs it. On a CPU the graph of the whole network is the faster one.

    Training, validation and sampling need separate graphs: with and without gradients, with and without autocast, for
    the first batch size, any other, small ones, and one image. torch limits a function to 8 graphs, and runs anything
    beyond uncompiled; blocks share the limit, and those that differ have graphs of their own. So it is raised here.
    """
    kinds = {type(block) for block in layer_blocks(net)}
    parts = [part for part in net.modules() if type(part) in kinds] if by_block and kinds else [net]
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 16 * len(parts))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
    for part in parts:
        part.compile(backend=backend)
