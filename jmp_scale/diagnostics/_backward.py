"""A loss with its arguments, for the diagnostics that trace it or rerun it."""

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from .._jaxpr import Program, bytes_per_entry, dtype_name, equations, is_floating
from .._scaling.finite import all_finite
from .._scaling.gradients import checked_output, differentiated
from .._scaling.loss_scale import DynamicLossScale, LossScale, scale_value
from .._state import IS_CHECKED
from .._tree import find_nodes, is_array, is_inexact, is_module, split_arrays
from .._types import Arrays, Function, PyTree, Scalar
from .._validation import require_callable

F = TypeVar("F", bound=Function)

# XLA may omit a rounding that the program asks for, depending on machine and version.
# With this option the program is measured as it is written.
ALL_ROUNDINGS: dict[str, bool | str] = {"xla_allow_excess_precision": False}


def meets_nonfinite(tool: F) -> F:
    """Lets a tool meet NaN and infinity, at which JAX's debug flags stop a program."""
    quiet: Any = jax.debug_nans(False)
    return quiet(jax.debug_infs(False)(tool))


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
    given_transform: Function | None  # as the user passed it

    def __post_init__(self) -> None:
        for fun in (self.fun, self.transform):
            require_callable(
                self.function, fun, "pass the function itself, not its result"
            )

    @functools.cached_property
    def transform(self) -> Function:
        """The transform that was passed, or the one that fits the arguments."""
        if self.given_transform is not None:
            return self.given_transform
        if find_nodes(is_module, self.args):
            flax: Any = sys.modules["flax.nnx"]  # which the module's class is from
            return flax.value_and_grad
        numbers, count = {*jax.tree.leaves(self.argnums)}, len(self.args)
        given = [x for n, x in enumerate(self.args) if {n, n - count} & numbers]
        leaves = jax.tree.leaves(given)
        is_whole = not find_nodes(_is_of_equinox, given) and all(
            map(is_inexact, leaves)
        )
        # Without an array to differentiate, JAX's own error says so.
        if is_whole or not any(map(_is_inexact_array, leaves)):
            return jax.value_and_grad
        return _value_and_grad_of_arrays

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


def _value_and_grad_of_arrays(
    fun: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Function:
    """Returns `jax.value_and_grad` of the inexact arrays; other leaves are fixed."""

    def value_and_grad(*args: PyTree) -> PyTree:
        def of_arrays(*arrays: PyTree) -> PyTree:
            return fun(*jax.tree.map(lambda y, x: y if x is None else x, args, arrays))

        arrays = jax.tree.map(lambda x: x if _is_inexact_array(x) else None, args)
        return jax.value_and_grad(of_arrays, argnums, has_aux)(*arrays)

    return value_and_grad


def _is_inexact_array(leaf: PyTree) -> bool:
    return is_array(leaf) and is_inexact(leaf)


def _is_of_equinox(x: object) -> bool:
    """Whether an object is a module of Equinox, whose Python floats are fixed."""
    return any(c.__module__.startswith("equinox.") for c in type(x).__mro__)


class Start(NamedTuple):
    """The S with which a gradient is computed first."""

    s: float
    settles: bool  # whether it is lowered, down to 1, while the gradient is not finite

    def found(self, run: Callable[[Scalar], Backward]) -> tuple[Backward, float]:
        """Returns the result of `run` and its S, the first S that is low enough."""
        s, found = self.s, run(jnp.float32(self.s))
        while self.settles and s > 1 and all_finite(found.loss):
            if all_finite(found.leaves):
                break
            s = max(s / 8, 1.0)
            found = run(jnp.float32(s))
        return found, s


def start_of(
    function: str, loss_scale: LossScale | ArrayLike | None, dtypes: Collection[str]
) -> Start:
    """Returns the start for an argument `loss_scale` of a diagnostic.

    None is for programs of these dtypes: bfloat16 trains without a loss scale.
    """
    if loss_scale is None:
        return Start(2.0**15, True) if "float16" in dtypes else Start(1.0, False)
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


def narrow_dtypes(program: Program) -> Counter[str]:
    """Counts what a program computes in floating dtypes below 32 bits, by dtype."""
    made = (v for eqn in equations(program) for v in eqn.outvars)
    narrow = (v for v in made if is_floating(v) and bytes_per_entry(v) < 4)
    return Counter(map(dtype_name, narrow))


def traced_in_float32(function: str, trace: Callable[[], Program]) -> Program:
    """Traces a loss that is to be float32; raises an error if `autocast` is in it.

    Nothing else reads the context in which `autocast` leaves its function in float32:
    a loss that computes less in half precision there has it somewhere.
    """
    program = trace()
    if found := narrow_dtypes(program):
        with IS_CHECKED(True):
            in_float32 = narrow_dtypes(trace())
        if in_float32 != found:
            raise TypeError(
                f"{function}: expected a float32 loss, got one under autocast; pass "
                "the float32 loss, without autocast"
            )
    return program
