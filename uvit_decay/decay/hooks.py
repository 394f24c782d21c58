"""Forward hooks that decay the shortcuts of a transformer without changes to its code.

Such a network computes v <- v + f(norm(v)) in its forward. Two kinds of hooks on its modules, on the norm, which is
called with v, and on a later module, turn this into Eq. 3, x <- alpha x + beta f(norm(x)):

- A **pair** (norm, branch), where a module ends the branch. Here v is x, and the branch's output f is replaced by
  beta f + (alpha - 1) x, so that the network's addition of x gives alpha x + beta f.
- A **gated** block, where a product follows the branch's last module (adaLN-Zero) and only the block's output can be
  changed. Its variable v stays undecayed; each norm receives x in place of v, f is the change of v since the previous
  norm, and the block's output v is replaced by x. So only norms and out-of-place additions may use v.

Both create new tensors only: tensors held by a checkpointed block, by another hook or by the caller are not modified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from os.path import commonprefix

from torch import Tensor, nn

from uvit_decay.decay.schedule import decayed_add
from uvit_decay.runtime.errors import UserError

Weights = Callable[[int], tuple[float | Tensor, float]]  # alpha and beta of branch k


class _Call(threading.local):
    """State of a site during one forward pass of its block, separate for each thread; copies start empty.

    `read` counts the norms called so far, `v` is the input of the last of them and `x` the decayed stream that replaces
    it. Outside of the block both are None.
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
        """Register the hooks on the modules of `model`; the site's first branch is branch `first` of the model.

        In one forward pass they run in the order: `forget` (enclosing module starts), `enter` (before each norm),
        `leave` (after the last module of the branch), `forget` (enclosing module returns or raises).
        """
        self.weights, self.first = weights, first
        # The innermost enclosing module clears the state too, even after an error: a checkpointed block stops its
        # recomputation halfway, and x would keep its whole graph alive.
        around = model.get_submodule(_common_parent(*self.norms, self.end))
        # prepend: these hooks run first, so that other hooks receive the values of the decayed network.
        self.handles = [model.get_submodule(n).register_forward_pre_hook(self.enter, prepend=True) for n in self.norms]
        self.handles.append(around.register_forward_pre_hook(self.forget, prepend=True))
        self.handles.append(around.register_forward_hook(self.forget, prepend=True, always_call=True))
        self.handles.append(model.get_submodule(self.end).register_forward_hook(self.leave, prepend=True))

    def remove(self) -> None:
        """Remove all hooks of this site."""
        for handle in self.handles:
            handle.remove()

    def enter(self, norm: nn.Module, args: tuple) -> tuple:
        """Replace the first argument of a norm by the decayed stream (pre-hook of every norm)."""
        if not args or not isinstance(args[0], Tensor):
            raise UserError(f"one of {self.norms} got no tensor as its first argument: name what is called with x")
        return (self.read(args[0]), *args[1:])

    def leave(self, module: nn.Module, args: tuple, out: object) -> Tensor:
        """Replace the output of the module that ends the branches, then clear the state (its forward hook)."""
        # Every norm must have run, and the output must add to the last norm's input: else the names are wrong.
        if self.call.read != len(self.norms):
            raise UserError(f"{self.end!r} ran after {self.call.read} of the calls of {self.norms}: check the names")
        if not isinstance(out, Tensor) or out.shape != self.call.v.shape:
            raise UserError(f"{self.end!r} gives no tensor of the shape that {self.norms[-1]!r} got: check the names")
        decayed = self.close(out)
        self.forget()
        return decayed

    def forget(self, module: nn.Module | None = None, args: tuple = (), out: object = None) -> None:
        """Clear the state (hook before and after the enclosing module, where `out` is None after an error).

        Raises:
            UserError: the module has returned, but its last branch did not end.
        """
        left_open = self.call.read if out is not None else 0
        self.call.x, self.call.v, self.call.read = None, None, 0
        if left_open:
            raise UserError(f"{self.end!r} was not called after {self.norms}: check the names")

    def read(self, v: Tensor) -> Tensor:
        """Record v, the input of a norm, and return the decayed stream that replaces it."""
        raise NotImplementedError

    def close(self, out: Tensor) -> Tensor:
        """Return the replacement of `out`, the output of the module that ends the branches."""
        raise NotImplementedError


class PairSite(Site):
    """Site of a branch that the network adds to its input unscaled: y = x + f(norm(x))."""

    def read(self, v: Tensor) -> Tensor:
        self.call.x, self.call.v, self.call.read = v, v, 1
        return v

    def close(self, out: Tensor) -> Tensor:
        """Return beta f + (alpha - 1) x, to which the network adds x."""
        alpha, beta = self.weights(self.first)
        return decayed_add(self.call.x, out, alpha - 1, beta)


class GatedSite(Site):
    """Site of branches that are scaled after their last module, as by adaLN's gates: y = x + g f(norm(x))."""

    def read(self, v: Tensor) -> Tensor:
        if self.call.read and v.shape != self.call.v.shape:
            raise UserError(f"one of {self.norms} is called with a tensor of another shape: check the names")
        # A later norm ends the branch before it: v then holds that branch's sum, which `close` turns into Eq. 3.
        x = self.close(v) if self.call.read else v
        self.call.x, self.call.v, self.call.read = x, v, self.call.read + 1
        return x

    def close(self, out: Tensor) -> Tensor:
        """Return Eq. 3 for the branch that ends here: out - v is its output g f, undecayed."""
        if out is self.call.v:
            raise UserError(f"{self.end!r} adds in place, where its branches cannot be told from its input")
        alpha, beta = self.weights(self.first + self.call.read - 1)
        return decayed_add(self.call.x, out - self.call.v, alpha, beta)


def _common_parent(*names: str) -> str:
    """Return the name of the innermost module that contains all the named ones."""
    return ".".join(commonprefix([name.split(".") for name in names]))
