"""The casts of both passes: all that a unit asks of the interpreter."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax import lax

from .._validation import warn
from .derivatives import Traces, on_gpu, with_value
from .products import Product

T = TypeVar("T")
_behind_barrier = jax.jit(functools.partial(on_gpu, lax.optimization_barrier))


@dataclasses.dataclass(eq=False)
class Notes:
    """What one call of a program has found so far, nested programs included."""

    warned: set[str]  # of these there is no further warning
    # Whether its gradients are float16 and no loss scale reaches them.
    lacks_scale: bool = False
    any_half: bool = False  # whether a product became half precision
    found: set[str] = dataclasses.field(default_factory=set)  # names that match
    there: set[str] = dataclasses.field(default_factory=set)  # what could be named

    def warn_once(self, about: str, message: str) -> None:
        """Warns, unless it has warned of this before."""
        if about not in self.warned:
            self.warned.add(about)
            warn(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Casting:
    """How the two passes of a program are cast. Equal ones share traces."""

    forward: np.dtype  # that of the products of the forward pass
    backward: np.dtype
    traces: Traces = dataclasses.field(compare=False)
    notes: Notes = dataclasses.field(compare=False)
    # Whether the backward pass recomputes islands. Not in a rule for derivatives, which
    # is transposed: what would be recomputed has no derivative there. Not in a
    # checkpoint with a policy, which says itself what is saved.
    recompute: bool = True
    in_loop: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether the backward pass has another range than the forward pass."""
        return self.forward != self.backward

    def in_backward(self, x: jax.Array, copy: jax.Array) -> jax.Array:
        """Returns a copy in the backward pass's dtype, which is differentiated as `x`.

        Second derivatives need the range of `backward`, which float16 copies lack.
        """
        read = copy.astype(self.forward)
        return with_value(x.astype(self.backward), read.astype(self.backward))

    def tangent_of(self, product: Product) -> Callable[..., jax.Array]:
        """Returns the function of a product's tangent, which equal products share."""
        tangent = self.traces.made(Product.tangent, product, self.backward)
        # The cotangent is then half precision, and an array of its own.
        return lambda *args: self.apart(tangent(*args))

    def apart(self, x: T) -> T:
        """Arrays behind an optimization barrier on GPUs.

        Without it XLA merges the recomputed island with that of the forward pass, and
        keeps its float32 values.
        """
        has_barrier = self.recompute and not self.in_loop
        return jax.tree.map(_behind_barrier, x) if has_barrier else x

    def note_derivative(self) -> None:
        """Warns once of float16 gradients that no loss scale reaches."""
        if self.notes.lacks_scale:
            self.notes.warn_once(
                "no loss scale",
                "autocast: float16 gradients without a loss scale: small ones vanish. "
                "Differentiate by jmp_scale.value_and_grad(fun, loss_scale), give "
                'with_loss_scale a DynamicLossScale(), or autocast backward="bfloat16"',
            )
