"""Pytrees: their leaves, casts, products with S, selection; a call as its arrays."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _mesh

T = TypeVar("T")

# Flax's name for float8 scales and maxima of the last steps (google/flax#3623).
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
_ARRAY = object()  # in the place of an array


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf holds real or complex floating-point numbers: only these scale."""
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def map_inexact(fun: Callable[..., Any], tree: T, *rest: Any) -> T:
    """`jax.tree.map` over the inexact leaves of `tree`; all others pass unchanged."""

    def map_leaf(leaf: Any, *others: Any) -> Any:
        return fun(leaf, *others) if is_inexact(leaf) else leaf

    return jax.tree.map(map_leaf, tree, *rest)


def named_inexact_leaves(tree: Any) -> tuple[tuple[str, ...], list[Any]]:
    names, leaves = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_inexact(leaf):
            names.append(jax.tree_util.keystr(path))
            leaves.append(leaf)
    return tuple(names), leaves


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Leaves by path. On disk keys, indices and names of fields are all strings."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in pairs}


def listed(paths: Iterable[str]) -> str:
    """At most five names, and how many more there are."""
    paths = sorted(paths)
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more or "none"


def promote_to_float32(tree: T) -> T:
    """Casts inexact leaves narrower than 32 bits to float32; all others pass."""

    def widen_leaf(leaf: Any) -> Any:
        narrow = jnp.result_type(leaf).itemsize < 4
        return jnp.asarray(leaf).astype(jnp.float32) if narrow else leaf

    return map_inexact(widen_leaf, tree)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts real floating-point arrays to `dtype`; all other leaves pass unchanged."""

    def cast_leaf(leaf: Any) -> Any:
        is_array = isinstance(leaf, (np.ndarray, np.generic, jax.Array))
        is_real = is_array and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_real else leaf

    return jax.tree.map(cast_leaf, tree)


def select_tree(pred: ArrayLike, on_true: T, on_false: T) -> T:
    """Chooses one of two equal-typed pytrees, leaf by leaf, without branching.

    It is `jnp.where` for arrays, NumPy arrays, typed PRNG keys and Python numbers.
    Leaves that hold no data (functions, strings) pass, and must be equal on both sides.

    Args:
      pred: bool[], typically `all_finite(grads)`.
      on_true: pytree taken where `pred`, e.g. the updated state.
      on_false: pytree taken otherwise, e.g. the state before the step.

    Returns:
      A pytree of the same structure, shapes and dtypes.

    Raises:
      ValueError: `pred` is not a boolean scalar, or the trees differ in structure,
        shape or dtype: nothing is ever broadcast or promoted.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale
      >>> new, old = {"w": jnp.array(2.0)}, {"w": jnp.array(1.0)}
      >>> float(jmp_scale.select_tree(jnp.array(False), new, old)["w"])
      1.0
    """
    if jnp.shape(pred) != () or jnp.result_type(pred) != jnp.bool_:
        got = f"{jnp.result_type(pred)}{list(jnp.shape(pred))}"
        raise ValueError(f"select_tree: expected a boolean scalar as pred, got {got}")
    treedef, old_treedef = jax.tree.structure(on_true), jax.tree.structure(on_false)
    if treedef != old_treedef:
        raise ValueError(
            "select_tree: expected on_true and on_false of the same structure, got\n"
            f"  on_true:  {treedef}\n  on_false: {old_treedef}"
        )
    select = functools.partial(_select_leaf, pred)
    return jax.tree_util.tree_map_with_path(select, on_true, on_false)


def _select_leaf(pred: ArrayLike, path: Any, on_true: Any, on_false: Any) -> Any:
    if on_true is on_false:
        return on_false
    if not (is_data(on_true) and is_data(on_false)):
        if type(on_true) is type(on_false) and on_true == on_false:
            return on_false
        raise ValueError(
            f"{_leaf_at(path)} is not an array and differs, so it cannot be selected: "
            f"on_true {on_true!r}, on_false {on_false!r}"
        )
    new, old = (jax.typeof(x) for x in (on_true, on_false))
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{_leaf_at(path)} has shape {new.shape} and dtype {new.dtype} in on_true, "
            f"but {old.shape} and {old.dtype} in on_false; reshape or cast one of them"
        )
    if new.dtype == jax.dtypes.float0:
        return on_false
    if isinstance(on_true, jax.Array) and isinstance(on_false, jax.Array):
        # One operation: `jnp.where` is several.
        select = lambda new, old, pred: lax.select(pred, new, old)  # noqa: E731
        return _mesh.on_parts(select, on_true, on_false, jnp.asarray(pred))
    return jnp.where(pred, on_true, on_false)


def _leaf_at(path: Any) -> str:
    return f"select_tree: leaf {jax.tree_util.keystr(path) or '(the whole tree)'}"


def is_data(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex))


def multiply(function: str, tree: T, s: jax.Array, *, inverse: bool = False) -> T:
    """`tree` times S, f32[], or times 1/S: as `DynamicLossScale.scale` says."""
    if jnp.shape(s) != ():
        raise ValueError(
            f"{function}: expected a scalar loss_scale, got one of shape "
            f"{jnp.shape(s)}; vmap {function} over it, or adjust one loss scale once "
            "with all_finite of all gradients"
        )

    def times(x: jax.Array, s: jax.Array) -> jax.Array:
        factor = s.astype(x.dtype)
        # Not a quotient: XLA:CPU keeps a copy of the gradients (test_performance).
        return x * (1 / factor if inverse else factor)

    def multiply_array(x: jax.Array, s: jax.Array) -> jax.Array:
        if not jnp.iscomplexobj(x):
            return times(x, s)
        # Part by part: the complex product (inf + 0j) * (S + 0j) has NaNs.
        return lax.complex(times(x.real, s), times(x.imag, s))

    def multiply_leaf(leaf: Any) -> jax.Array:
        # Before the product: a float16 loss of 3 times S = 2^15 is infinite.
        return _mesh.on_parts(multiply_array, jnp.asarray(promote_to_float32(leaf)), s)

    return map_gradients(multiply_leaf, tree)


def map_gradients(fun: Callable[[Any], Any], tree: T) -> T:
    """`map_inexact`, except below a key `_overwrite_with_gradient`, at any depth.

    What JAX's transforms return for that collection of Flax's float8 layers are the
    next values of its scales, not gradients: they were never multiplied by S.
    """

    def map_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        names = (getattr(key, "key", None) for key in path)
        if not is_inexact(leaf) or OVERWRITE_WITH_GRADIENT in names:
            return leaf
        return fun(leaf)

    return jax.tree_util.tree_map_with_path(map_leaf, tree)


def find_nodes(is_node: Callable[[Any], bool], tree: Any) -> list[tuple[Any, Any]]:
    """(key path, node) of every `is_node` in a pytree, outermost only."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node)
    return [(path, node) for path, node in nodes if is_node(node)]


def with_arrays(tree: Any) -> Any:
    """`tree` with the arrays that NNX's variables in it hold."""

    def array(x: Any) -> Any:
        # A variable is a pytree of one leaf, or of none if it holds None, as beside a
        # float32 parameter; `x[...]` is a copy in Flax 0.12.0.
        return next(iter(jax.tree.leaves(x)), None) if is_variable(x) else x

    return jax.tree.map(array, tree, is_leaf=is_variable)


def is_variable(x: Any) -> bool:
    return hasattr(x, "copy_from")  # Flax need not be imported


class FlatCall:
    """A call as a function of its arrays alone, which returns arrays alone."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._fun = fun
        self.leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=is_module)
        self.arrays = [x for x in self.leaves if isinstance(x, jax.Array)]
        self.__name__ = self.__qualname__ = getattr(fun, "__name__", "fun")

    def __call__(self, *arrays: Any) -> list[Any]:
        left = iter(arrays)
        leaves = [next(left) if isinstance(x, jax.Array) else x for x in self.leaves]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        results, self._out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
        self._out = [_ARRAY if isinstance(x, jax.Array) else x for x in results]
        return [x for x in results if isinstance(x, jax.Array)]

    def result(self, arrays: Sequence[Any]) -> Any:
        left = iter(arrays)
        out = [next(left) if x is _ARRAY else x for x in self._out]
        return jax.tree.unflatten(self._out_tree, out)


def is_module(x: Any) -> bool:
    bases = [c.__name__ for c in type(x).__mro__ if c.__module__.startswith("flax.nnx")]
    return not {"Module", "Object", "Pytree"}.isdisjoint(bases)
