"""A loss with its arguments, for the diagnostics that trace it or rerun it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from .._scaling.finite import all_finite
from .._scaling.gradients import checked_output, value_and_grad
from .._scaling.loss_scale import DynamicLossScale, LossScale, scale_value
from .._tree import is_array, is_inexact, named_inexact_leaves, split_arrays
from .._types import Arrays, Function, PyTree, Scalar

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
    """A loss and how it is differentiated, checked as `precision_report` documents."""

    function: str  # name of the public function, for errors
    fun: Function
    args: tuple[PyTree, ...]
    argnums: int | Sequence[int]
    has_aux: bool
    transform: Function

    def __post_init__(self) -> None:
        for name, value in (("fun", self.fun), ("transform", self.transform)):
            if not callable(value):
                raise TypeError(
                    f"{self.function}: expected {name} to be a function, got "
                    f"{described(value)}; pass the function itself, not its result"
                )
        numbers = jax.tree.leaves(self.argnums)
        if not numbers:
            raise ValueError(
                f"{self.function}: expected a position in argnums, got none; "
                "name the arguments to differentiate"
            )
        for number in numbers:
            if isinstance(number, int):  # not a filter of NNX
                self._check_differentiable(number)

    def check_output(self, out: PyTree) -> None:
        """Raises an error unless `fun` returned a real scalar loss, or (loss, aux)."""
        checked_output(self.function, out, self.has_aux)
        loss = out[0] if self.has_aux else out
        dtype = jnp.result_type(loss)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{self.function}: expected fun to return a real scalar loss, got "
                f"{dtype}; return its real part, or cast it"
            )

    def run(self, s: ArrayLike, args: tuple[PyTree, ...]) -> Backward:
        """Runs `value_and_grad` at S = `s`, f32[], which may be traced."""

        def checked(*args: PyTree) -> PyTree:
            out = self.fun(*args)
            self.check_output(out)
            return out

        # With a StaticLossScale a sweep would recompile for each S.
        loss_scale = DynamicLossScale(
            jnp.asarray(s, jnp.float32), min_loss_scale=0, max_loss_scale=2.0**126
        )
        differentiated = value_and_grad(
            checked, loss_scale, self.argnums, self.has_aux, transform=self.transform
        )
        value, grads = differentiated(*args)
        paths, leaves = named_inexact_leaves(grads)
        return Backward(value[0] if self.has_aux else value, leaves, paths)

    def _check_differentiable(self, number: int) -> None:
        if not -len(self.args) <= number < len(self.args):
            raise ValueError(
                f"{self.function}: expected argnums of {len(self.args)} arguments, got "
                f"{number}; give fun all of its arguments"
            )
        pairs = jax.tree_util.tree_flatten_with_path(self.args[number])[0]
        other = [(path, leaf) for path, leaf in pairs if not is_inexact(leaf)]
        strict = self.transform is jax.value_and_grad
        if len(other) < len(pairs) and not (strict and other):
            return
        got = "no arrays"
        if other:
            path, leaf = other[0]
            got = f"{described(leaf)} at args[{number}]{jax.tree_util.keystr(path)}"
        raise TypeError(
            f"{self.function}: expected floating-point arrays in the differentiated "
            f"argument {number}, got {got}; choose others with argnums, or a transform "
            "that selects them, such as equinox.filter_value_and_grad or "
            "flax.nnx.value_and_grad"
        )


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
    settles = isinstance(loss_scale, DynamicLossScale)
    return Start(float(scale_value(function, loss_scale)), settles)


def concrete_arrays(
    function: str, args: PyTree
) -> tuple[list[jax.Array], Callable[[Arrays], PyTree]]:
    """`split_arrays` for a tool that runs on the host."""
    arrays, rejoin = split_arrays(args)
    if any(isinstance(x, Tracer) for x in arrays):
        raise TypeError(
            f"{function}: expected arrays with values, got traced ones; call it "
            "outside of jax.jit, vmap and grad: it compiles what it runs itself"
        )
    return arrays, rejoin


def described(value: Any) -> str:
    """Returns dtype and shape of an array, or the type of another value, for errors."""
    if is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return f"a {type(value).__name__}"
