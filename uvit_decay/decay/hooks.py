"""Forward hooks that decay the shortcuts of a network without changes to its code.

A transformer computes v <- v + f(norm(v)) in its forward. Hooks on the norm, which is called with v, and on a later
module turn this into Eq. 3, x <- alpha x + beta f(norm(x)):

- **Pair** (norm, branch): a module ends the branch. Here v is x, and the branch's output f is replaced by
  beta f + (alpha - 1) x, so that the network's addition of x gives alpha x + beta f.
- **Gated** block: a product follows the branch's last module (adaLN-Zero), and only the block's output can be changed.
  Its variable v stays undecayed. Each norm receives x instead of v, f is the change of v since the previous norm, and
  the block's output v is replaced by x. So only norms and out-of-place additions may use v.

A ResNet computes relu(shortcut(x) + f(x)), where f begins with a convolution. If its shortcut is the identity, f is a
**pair** (convolution, last norm), as above. A **projected** shortcut is a module, and its output is scaled.

All hooks create new tensors: tensors of a checkpointed block, of another hook or of the caller are not modified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from os.path import commonprefix

import torch
from torch import Tensor, nn

from uvit_decay.decay.weights import Weights, decayed_add
from uvit_decay.terminal.errors import UserError

WeightsOf = Callable[[int], Weights]  # the weights of branch k


class BranchState(threading.local):
    """State of hooked branches during one forward pass of their block, separate for each thread; copies start empty.

    `count` is the number of norms called so far, `v` the input of the last one, and `x` the decayed stream that
    replaces v. Outside of the block x and v are None.
    """

    x: Tensor | None = None
    v: Tensor | None = None
    count: int = 0

    def __reduce__(self) -> tuple[type[BranchState], tuple[()]]:
        return BranchState, ()


class StartedGroups(threading.local):
    """Numbers of the groups of branches that started in a forward pass, for each thread; None outside of a pass.

    Copies start empty.
    """

    numbers: set[int] | None = None

    def __reduce__(self) -> tuple[type[StartedGroups], tuple[()]]:
        return StartedGroups, ()


class ExecutionOrder:
    """Check that groups of branches start in the order of their numbers in each forward pass of a model.

    Compiled graphs and calls of parts of the model are not checked.
    """

    def __init__(self, model: nn.Module, groups: Sequence[HookedBranches]) -> None:
        """Register the hooks that begin and end a pass, and one at the first module of each group of branches."""
        self.started = StartedGroups()
        self.handles = [
            model.register_forward_pre_hook(self.begin),
            model.register_forward_hook(self.end, always_call=True),
        ]
        for number, group in enumerate(groups):
            first = model.get_submodule(group.norms[0])
            self.handles.append(first.register_forward_pre_hook(partial(self.check, number, group.norms)))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def begin(self, model: nn.Module, args: tuple) -> None:
        """Begin a pass (pre-hook of the model)."""
        if not torch.compiler.is_compiling():
            self.started.numbers = set()

    def end(self, model: nn.Module, args: tuple, out: object) -> None:
        """End a pass, also after an error (hook of the model). Blocks that are recomputed later are not checked."""
        if not torch.compiler.is_compiling():
            self.started.numbers = None

    def check(self, number: int, names: Sequence[str], module: nn.Module, args: tuple) -> None:
        """Raise a UserError if a group with a larger number has started before; a repeated start is not an error."""
        if torch.compiler.is_compiling():
            return
        started = self.started.numbers
        if started is None or number in started:
            return
        if started and number < max(started):
            raise UserError(f"{names} ran after later `pairs`: give `pairs` in the order of execution")
        started.add(number)


class HookedBranches:
    """Hooks on the norms of some branches and on the module that ends them (abstract).

    `norms` are the first modules of the branches, called with x; in a ResNet they are convolutions.
    """

    def __init__(self, norms: Sequence[str], end: str) -> None:
        self.norms = tuple(norms)
        self.end = end
        self.state = BranchState()

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all modules that get hooks."""
        return *self.norms, self.end

    def register(self, model: nn.Module, weights: WeightsOf, first: int) -> None:
        """Register the hooks on the modules of `model`; the first branch here is branch `first` of the model.

        In one forward pass they run in the order: `forget` (enclosing module starts), `enter` (before each norm),
        `leave` (after the last module of the branch), `forget` (enclosing module returns or raises).
        """
        self.weights = weights
        self.first = first
        # The innermost enclosing module also clears the state, even after an error: a checkpointed block stops its
        # recomputation halfway, and x would keep the whole graph alive.
        paths = [name.split(".") for name in self.modules]
        common = commonprefix(paths)
        if ".".join(common) in self.norms:  # a branch that is one module must not clear the state between its own hooks
            common = common[:-1]
        around = model.get_submodule(".".join(common))
        # prepend: these hooks run first, so that other hooks receive the values of the decayed network. `forget` does
        # not change values and is not prepended, because torch 2.9 does not compile two prepended hooks of a module.
        self.handles = []
        for name in self.norms:
            norm = model.get_submodule(name)
            self.handles.append(norm.register_forward_pre_hook(self.enter, prepend=True))
        self.handles.append(around.register_forward_pre_hook(self.forget))
        self.handles.append(around.register_forward_hook(self.forget, always_call=True))
        self.handles.append(model.get_submodule(self.end).register_forward_hook(self.leave, prepend=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def enter(self, norm: nn.Module, args: tuple) -> tuple:
        """Replace the first argument of a norm by the decayed stream (pre-hook of every norm)."""
        if not args or not isinstance(args[0], Tensor):
            raise UserError(
                f"one of {self.norms} got no tensor as its first argument: name in `pairs` the modules that a branch "
                "calls first, with the stream x"
            )
        return (self.on_norm_input(args[0]), *args[1:])

    def leave(self, module: nn.Module, args: tuple, out: object) -> Tensor:
        """Replace the output of the module that ends the branches, then clear the state (its forward hook)."""
        if self.state.count != len(self.norms):
            raise UserError(
                f"{self.end!r} ran after {self.state.count} of the calls of {self.norms}: list the branches in `pairs` "
                "in the order in which they run, each with the module that it calls last"
            )
        # The output must have the shape of the tensor to which it is added. Otherwise the names are wrong.
        if not isinstance(out, Tensor) or self.state.v is None or out.shape != self.state.v.shape:
            raise UserError(
                f"{self.end!r} returns no tensor in the shape of the input of {self.modules[-2]!r}, to which it is "
                "added: correct their entry in `pairs`"
            )
        decayed = self.apply_decay(out)
        self.forget()
        return decayed

    def forget(self, module: nn.Module | None = None, args: tuple = (), out: object = None) -> None:
        """Clear the state (hook before and after the enclosing module, where `out` is None after an error).

        Raises:
            UserError: the module has returned, but its last branch did not end.
        """
        left_open = out is not None and self.state.count > 0
        self.state.x = None
        self.state.v = None
        self.state.count = 0
        if left_open:
            raise UserError(f"{self.end!r} was not called after {self.norms}; check the names")

    def on_norm_input(self, v: Tensor) -> Tensor:
        """Record v, the input of a norm, and return the decayed stream that replaces it."""
        raise NotImplementedError

    def apply_decay(self, out: Tensor) -> Tensor:
        """Return the replacement of `out`, the output of the module that ends the branches."""
        raise NotImplementedError


class HookedPair(HookedBranches):
    """A branch that the network adds to its input unscaled: y = x + f(norm(x))."""

    def __init__(self, norm: str, branch: str) -> None:
        super().__init__([norm], branch)

    def register(self, model: nn.Module, weights: WeightsOf, first: int) -> None:
        """Register the hooks, with a further one on the norm if its output is scaled."""
        super().register(model, weights, first)
        if weights(first).scale != 1.0:
            norm = model.get_submodule(self.norms[0])
            self.handles.append(norm.register_forward_hook(self.scale_norm, prepend=True))

    def scale_norm(self, norm: nn.Module, args: tuple, out: Tensor) -> Tensor:
        """Return the scaled output of the norm (its forward hook)."""
        return self.weights(self.first).scale * out

    def on_norm_input(self, v: Tensor) -> Tensor:
        self.state.x = v
        self.state.v = v
        self.state.count = 1
        return v

    def apply_decay(self, out: Tensor) -> Tensor:
        """Return beta f + (alpha - 1) x, to which the network adds x."""
        alpha, beta, _ = self.weights(self.first)
        return decayed_add(self.state.x, out, alpha - 1, beta)


class HookedProjection(HookedBranches):
    """A branch beside a projected shortcut, which is called after it: y = projection(x) + f(x)."""

    def __init__(self, first: str, last: str, projection: str) -> None:
        super().__init__([first], projection)
        self.last = last

    @property
    def modules(self) -> tuple[str, ...]:
        return *self.norms, self.last, self.end

    def register(self, model: nn.Module, weights: WeightsOf, first: int) -> None:
        """Register the hooks, with a further one on the last module of the branch."""
        super().register(model, weights, first)
        self.handles.append(model.get_submodule(self.last).register_forward_hook(self.scale, prepend=True))

    def scale(self, module: nn.Module, args: tuple, out: object) -> Tensor:
        """Return beta f, and record f, whose shape `leave` checks (forward hook of the branch's last module)."""
        if not isinstance(out, Tensor):
            raise UserError(f"{self.last!r} returns no tensor; check the names")
        self.state.v = out
        beta = self.weights(self.first).beta
        if not isinstance(beta, Tensor) and beta == 1.0:
            return out
        return beta * out

    def on_norm_input(self, v: Tensor) -> Tensor:
        self.state.count = 1
        return v

    def apply_decay(self, out: Tensor) -> Tensor:
        """Return alpha times the projection, to which the network adds beta f."""
        alpha = self.weights(self.first).alpha
        if isinstance(alpha, Tensor):
            alpha = alpha.to(out.dtype)
        return out * alpha


class HookedGates(HookedBranches):
    """Branches that are scaled after their last module, as by adaLN's gates: y = x + g f(norm(x))."""

    def on_norm_input(self, v: Tensor) -> Tensor:
        if self.state.count and v.shape != self.state.v.shape:
            raise UserError(f"one of {self.norms} is called with a tensor of another shape; check the names")
        # A later norm ends the branch before it. v is then the sum after that branch; `apply_decay` returns Eq. 3.
        x = self.apply_decay(v) if self.state.count else v
        self.state.x = x
        self.state.v = v
        self.state.count += 1
        return x

    def apply_decay(self, out: Tensor) -> Tensor:
        """Return Eq. 3 for the branch that ends here: out - v is its output g f, undecayed."""
        if out is self.state.v:
            raise UserError(
                f"{self.end!r} adds its branches in place, so they cannot be decayed; change it to add out of place"
            )
        alpha, beta, _ = self.weights(self.first + self.state.count - 1)
        return decayed_add(self.state.x, out - self.state.v, alpha, beta)
