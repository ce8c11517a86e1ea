"""A loss with its arguments, for the diagnostics that trace it or rerun it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from .._jaxpr import Program, bytes_per_entry, dtype_name, equations, is_floating
from .._scaling.finite import all_finite
from .._scaling.gradients import checked_output, differentiated
from .._scaling.loss_scale import DynamicLossScale, LossScale, scale_value
from .._tree import is_inexact, split_arrays
from .._types import Arrays, Function, PyTree, Scalar
from .._validation import require_callable

# XLA may omit a rounding that the program asks for, depending on machine and version.
# With this option the program is measured as it is written.
ALL_ROUNDINGS: dict[str, bool | str] = {"xla_allow_excess_precision": False}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Backward:
    """The loss, the inexact leaves of the unscaled gradients, and their names."""

    loss: PyTree
    leaves: PyTree
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss and how it is differentiated, as `precision_report` documents."""

    function: str  # name of the public function, for errors
    fun: Function
    args: tuple[PyTree, ...]
    argnums: int | Sequence[int]
    has_aux: bool
    transform: Function

    def __post_init__(self) -> None:
        for fun in (self.fun, self.transform):
            require_callable(
                self.function, fun, "pass the function itself, not its result"
            )

    def of(self, out: PyTree) -> PyTree:
        """Returns the loss in what `fun` returned, which is checked."""
        checked_output(self.function, out, self.has_aux)
        return out[0] if self.has_aux else out

    def run(self, s: ArrayLike, args: tuple[PyTree, ...]) -> Backward:
        """Runs `value_and_grad` at S = `s`, f32[], which may be traced."""
        # With a StaticLossScale a sweep would recompile for each S.
        loss_scale = DynamicLossScale(
            jnp.asarray(s, jnp.float32), min_loss_scale=0, max_loss_scale=2.0**126
        )
        given = self.fun, loss_scale, self.argnums, self.has_aux, self.transform
        value, grads = differentiated(self.function, *given, {})(*args)
        pairs = jax.tree_util.tree_leaves_with_path(grads)
        leaves = [(path, x) for path, x in pairs if is_inexact(x)]
        paths = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
        loss = value[0] if self.has_aux else value
        return Backward(loss, [x for _, x in leaves], paths)


class Start(NamedTuple):
    """The S with which a gradient is computed first."""

    s: float
    settles: bool  # whether it is lowered, down to 1, while the gradient is not finite

    def found(self, run: Callable[[Scalar], Backward]) -> tuple[Backward, float]:
        """Returns the result of `run` and its S, the first S that is low enough."""
        s = self.s
        while True:
            found = run(jnp.float32(s))
            is_last = not self.settles or s <= 1 or not all_finite(found.loss)
            if is_last or all_finite(found.leaves):
                return found, s
            s = max(s / 8, 1.0)


def start_of(function: str, loss_scale: LossScale | ArrayLike | None) -> Start:
    """Returns the start for an argument `loss_scale` of a diagnostic."""
    if loss_scale is None:
        return Start(2.0**15, True)
    adjusts = isinstance(loss_scale, LossScale) and jax.tree.leaves(loss_scale)
    return Start(scale_value(function, loss_scale), bool(adjusts))


def concrete_arrays(
    function: str, args: PyTree
) -> tuple[list[jax.Array], Callable[[Arrays], PyTree]]:
    """Splits arguments for a tool that runs on the host, as `split_arrays` does."""
    arrays, rejoin = split_arrays(args)
    if any(isinstance(x, Tracer) for x in arrays):
        raise TypeError(
            f"{function}: expected arrays with values, got traced ones; call it "
            "outside of jax.jit, vmap and grad: it compiles what it runs itself"
        )
    return arrays, rejoin


def narrow_dtypes(program: Program) -> set[str]:
    """Returns names of the floating dtypes below 32 bits that a program computes."""
    made = (v for eqn in equations(program) for v in eqn.outvars)
    return {dtype_name(v) for v in made if is_floating(v) and bytes_per_entry(v) < 4}
