"""Decayed shortcuts for transformers that are not ours: their code stays as it is, hooks on their modules do the rest.

Such a network computes v <- v + f(norm(v)) in a forward that nobody edits. Its modules can be hooked: the norm, called
with v, and one behind it. Two ways lead to Eq. 3, x <- alpha x + beta f(norm(x)):

- A **pair** (norm, branch), where a module ends the branch. Here v is x, and the branch's output f is replaced by
  beta f + (alpha - 1) x, so that the addition behind it makes alpha x + beta f.
- A **gated** block, where something multiplies behind the branch's last module (adaLN-Zero) and only the block's output
  can be changed. Its variable v runs on undecayed; each norm is given x in place of v, f is what v has gained since the
  norm before, and the block's output v is replaced by x. So nothing but norms and additions, out of place, may use v.

Both only make new tensors: what a checkpointed block, another hook or the caller holds is never written to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from os.path import commonprefix

from torch import Tensor, nn

from uvit_decay.decay.schedule import decayed_add
from uvit_decay.errors import UserError

Weights = Callable[[int], tuple[float | Tensor, float]]  # alpha and beta of branch k


class _Call(threading.local):
    """What a site remembers while its block runs, one for each thread; a copy remembers nothing.

    `v` is what the last of `read` norms was called with, `x` what it should have been, None outside of the branch.
    """

    x: Tensor | None = None
    v: Tensor | None = None
    read: int = 0

    def __reduce__(self) -> tuple[type[_Call], tuple[()]]:
        return _Call, ()


class Site:
    """Hooks on the norms of some branches and on the module that ends them (abstract)."""

    def __init__(self, norms: Sequence[str], end: str) -> None:
        self.norms, self.end = tuple(norms), end
        self.call = _Call()

    def register(self, model: nn.Module, weights: Weights, first: int) -> None:
        """Hook the modules; the site's first branch is branch `first` of the model."""
        self.weights, self.first = weights, first
        # The innermost module around the site ends its memory too, errors included: a checkpointed block stops its
        # recomputation halfway, and x would hold the whole graph of it.
        around = model.get_submodule(_common_parent(*self.norms, self.end))
        # Ours come first: hooks of others see what the decayed network computes.
        self.handles = [model.get_submodule(n).register_forward_pre_hook(self.enter, prepend=True) for n in self.norms]
        self.handles.append(around.register_forward_pre_hook(self.forget, prepend=True))
        self.handles.append(around.register_forward_hook(self.forget, prepend=True, always_call=True))
        self.handles.append(model.get_submodule(self.end).register_forward_hook(self.leave, prepend=True))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def enter(self, norm: nn.Module, args: tuple) -> tuple:
        """Before a norm."""
        if not args or not isinstance(args[0], Tensor):
            raise UserError(f"one of {self.norms} got no tensor as its first argument: name what is called with x")
        return (self.read(args[0]), *args[1:])

    def leave(self, module: nn.Module, args: tuple, out: object) -> Tensor:
        """After the module that ends the branches."""
        if self.call.read != len(self.norms):
            raise UserError(f"{self.end!r} ran after {self.call.read} of the calls of {self.norms}: check the names")
        if not isinstance(out, Tensor) or out.shape != self.call.v.shape:
            raise UserError(f"{self.end!r} gives no tensor of the shape that {self.norms[-1]!r} got: check the names")
        decayed = self.close(out)
        self.forget()
        return decayed

    def forget(self, module: nn.Module | None = None, args: tuple = (), out: object = None) -> None:
        """Before and after the module around the site; `out` is None after an error."""
        left_open = self.call.read if out is not None else 0
        self.call.x, self.call.v, self.call.read = None, None, 0
        if left_open:
            raise UserError(f"{self.end!r} was not called after {self.norms}: check the names")

    def read(self, v: Tensor) -> Tensor:
        """What a norm gets that was called with v."""
        raise NotImplementedError

    def close(self, out: Tensor) -> Tensor:
        """What takes the place of the output of the module that ends the branches."""
        raise NotImplementedError


class PairSite(Site):
    """A branch that the network adds to its input as it is: y = x + f(norm(x))."""

    def read(self, v: Tensor) -> Tensor:
        self.call.x, self.call.v, self.call.read = v, v, 1
        return v

    def close(self, out: Tensor) -> Tensor:
        """beta f + (alpha - 1) x, to which the network adds x."""
        alpha, beta = self.weights(self.first)
        return decayed_add(self.call.x, out, alpha - 1, beta)


class GatedSite(Site):
    """Branches that are scaled after their last module, as by adaLN's gates: y = x + g f(norm(x))."""

    def read(self, v: Tensor) -> Tensor:
        if self.call.read and v.shape != self.call.v.shape:
            raise UserError(f"one of {self.norms} is called with a tensor of another shape: check the names")
        x = self.close(v) if self.call.read else v
        self.call.x, self.call.v, self.call.read = x, v, self.call.read + 1
        return x

    def close(self, out: Tensor) -> Tensor:
        """Eq. 3 for the branch that ends here, where v has become `out`."""
        if out is self.call.v:
            raise UserError(f"{self.end!r} adds in place, where its branches cannot be told from its input")
        alpha, beta = self.weights(self.first + self.call.read - 1)
        return decayed_add(self.call.x, out - self.call.v, alpha, beta)


def _common_parent(*names: str) -> str:
    return ".".join(commonprefix([name.split(".") for name in names]))
