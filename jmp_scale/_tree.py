"""Pytrees: finds, casts, scales and selects their leaves; flattens calls to arrays."""

import collections
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _mesh
from ._types import Arrays, Function, KeyPath, PyTree

T = TypeVar("T")

# Flax's name for float8 scales and histories of maxima (google/flax#3623).
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def is_inexact(leaf: PyTree) -> bool:
    """Whether a leaf holds real or complex floating-point numbers; only these scale."""
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def map_inexact(fun: Function, tree: T, *rest: PyTree) -> T:
    """Applies `fun` to the inexact leaves of `tree`; returns the others unchanged."""
    return jax.tree.map(
        lambda leaf, *others: fun(leaf, *others) if is_inexact(leaf) else leaf,
        tree,
        *rest,
    )


def leaves_by_name(tree: PyTree) -> dict[str, PyTree]:
    """Returns leaves by path; on disk keys, indices and field names are all strings."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in pairs]
    count = collections.Counter(names)
    return {  # of which a key "a/b" and a key "b" of "a" have different ones
        name if count[name] == 1 else jax.tree_util.keystr(path): x
        for name, (path, x) in zip(names, pairs, strict=True)
    }


def promote_to_float32(tree: T) -> T:
    """Casts inexact leaves narrower than 32 bits to float32, and no others."""

    def widen_leaf(leaf: PyTree) -> PyTree:
        narrow = jnp.result_type(leaf).itemsize < 4
        return jnp.asarray(leaf).astype(jnp.float32) if narrow else leaf

    return map_inexact(widen_leaf, tree)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts real floating-point arrays to `dtype`; returns other leaves unchanged.

    Those below `_overwrite_with_gradient` stay too: a float8 scale in half precision is
    another scale.
    """

    def cast_leaf(leaf: PyTree) -> PyTree:
        is_array = isinstance(leaf, (np.ndarray, np.generic, jax.Array))
        is_real = is_array and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_real else leaf

    return map_gradients(cast_leaf, tree)


def select_tree(pred: ArrayLike, on_true: T, on_false: T) -> T:
    """Selects one of two pytrees of equal types, leaf by leaf, without branching.

    Use it in your own training loop to keep the old state on a skipped step. It selects
    arrays, typed PRNG keys and numbers. Other leaves must be equal in both trees.

    Args:
      pred: bool[], typically `all_finite(grads)`.
      on_true: pytree taken where `pred`, e.g. the updated state.
      on_false: pytree taken otherwise, e.g. the state before the step.

    Returns:
      A pytree of the same structure, shapes and dtypes.

    Raises:
      ValueError: `pred` is not a boolean scalar, or the trees differ in structure,
        shape or dtype, because nothing is ever broadcast or promoted.
    """
    if (got := type_name(pred)) != "bool[]":
        raise ValueError(
            f"select_tree: expected a boolean scalar as pred, got {got}; write "
            "select_tree(pred, on_true, on_false)"
        )
    select = functools.partial(_select_leaf, pred)
    return jax.tree_util.tree_map_with_path(select, on_true, on_false)


def _select_leaf(
    pred: ArrayLike, path: KeyPath, on_true: PyTree, on_false: PyTree
) -> PyTree:
    if on_true is on_false:
        return on_false
    where = f"select_tree: leaf {jax.tree_util.keystr(path) or '(the whole tree)'}"
    if not (is_data(on_true) and is_data(on_false)):
        if type(on_true) is type(on_false) and on_true == on_false:
            return on_false
        raise ValueError(
            f"{where} is not an array and differs, so it cannot be selected: "
            f"on_true {on_true!r}, on_false {on_false!r}"
        )
    new, old = (jax.typeof(x) for x in (on_true, on_false))
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{where} has shape {new.shape} and dtype {new.dtype} in on_true, "
            f"but {old.shape} and {old.dtype} in on_false; reshape or cast one of them"
        )
    if isinstance(on_true, jax.Array) and isinstance(on_false, jax.Array):
        # One operation: `jnp.where` is several.
        select = lambda new, old, pred: lax.select(pred, new, old)  # noqa: E731
        return _mesh.on_parts(select, on_true, on_false, jnp.asarray(pred))
    return jnp.where(pred, on_true, on_false)


def is_data(leaf: object) -> bool:
    """Whether a leaf is an array or a number."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex))


def type_name(x: object) -> str:
    """Returns dtype and shape of an array or a number, or the class of another."""
    if is_data(x) or hasattr(x, "dtype"):
        return f"{getattr(x, 'dtype', type(x).__name__)}{[*getattr(x, 'shape', ())]}"
    return f"a {type(x).__name__}"


def multiply(function: str, tree: T, s: jax.Array, *, inverse: bool = False) -> T:
    """Multiplies gradients by S, f32[], or by 1/S: see `DynamicLossScale.scale`."""
    if jnp.shape(s) != ():
        raise ValueError(
            f"{function}: expected a scalar loss_scale, got one of shape "
            f"{jnp.shape(s)}; vmap {function} over it, or adjust one loss scale once "
            "with all_finite of all gradients"
        )

    def multiply_array(x: jax.Array, s: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x):
            # The complex product (inf + 0j) * (S + 0j) would have NaNs.
            return lax.complex(multiply_array(x.real, s), multiply_array(x.imag, s))
        factor = s.astype(x.dtype)
        # For a quotient XLA:CPU would copy the gradients (test_targets).
        return x * (1 / factor if inverse else factor)

    def multiply_leaf(leaf: PyTree) -> jax.Array:
        # Promote before multiplying, because in float16 a loss of 3 times S = 2^15 is
        # infinite.
        return _mesh.on_parts(multiply_array, jnp.asarray(promote_to_float32(leaf)), s)

    return map_gradients(multiply_leaf, tree)


def map_gradients(fun: Callable[[PyTree], PyTree], tree: T) -> T:
    """Applies `fun` to inexact leaves that are not below `_overwrite_with_gradient`."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, are_next_values(tree), strict=True)
    mapped = [fun(x) if is_inexact(x) and not is_next else x for x, is_next in pairs]
    return jax.tree.unflatten(structure, mapped)


def are_next_values(tree: PyTree) -> list[bool]:
    """Returns for each leaf whether it belongs to Flax's float8 collection.

    In place of gradients of these leaves JAX's transforms return their next values,
    which must not be multiplied, added or averaged. Flax reserves the collection's
    name: a key of a mapping, or the type that NNX makes of it.
    """

    def is_variable_of_it(node: PyTree) -> bool:
        return is_variable(node) and type(node).__name__ == OVERWRITE_WITH_GRADIENT

    found: list[bool] = []
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable_of_it)
    for path, node in nodes:
        names = [getattr(key, "key", None) for key in path]
        is_next = OVERWRITE_WITH_GRADIENT in names or is_variable_of_it(node)
        found += [is_next] * len(jax.tree.leaves(node))
    return found


def is_array(leaf: PyTree) -> bool:
    """Whether a leaf is an array for JAX, or stands for one."""
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    # NumPy's strings, objects and dates are not arrays for JAX. Keys have no kind.
    return isinstance(leaf, kinds) and getattr(leaf.dtype, "kind", "V") not in "OSUMm"


def find_nodes(
    is_node: Callable[[PyTree], bool], tree: PyTree
) -> list[tuple[KeyPath, PyTree]]:
    """Returns path and node of the outermost nodes for which `is_node` is true."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node)
    return [(path, node) for path, node in nodes if is_node(node)]


def with_arrays(tree: PyTree) -> PyTree:
    """Replaces NNX variables by their arrays."""

    def array(x: PyTree) -> PyTree:
        # A variable has one leaf, or none if it holds None. `x[...]` may be a copy.
        return next(iter(jax.tree.leaves(x)), None) if is_variable(x) else x

    return jax.tree.map(array, tree, is_leaf=is_variable)


def is_variable(x: object) -> bool:
    """Whether a node is an NNX variable."""
    return hasattr(x, "copy_from")  # Flax need not be imported


def split_arrays(tree: PyTree) -> tuple[list[jax.Array], Callable[[Arrays], PyTree]]:
    """Returns the arrays among the leaves, and a function that rejoins a new tree."""
    leaves, structure = jax.tree.flatten(tree)

    def rejoin(arrays: Arrays) -> PyTree:
        left = iter(arrays)
        new_leaves = [next(left) if is_array(leaf) else leaf for leaf in leaves]
        return jax.tree.unflatten(structure, new_leaves)

    return [leaf for leaf in leaves if is_array(leaf)], rejoin


def is_module(x: object) -> bool:
    """Whether an object is a module of Flax NNX, which need not be imported."""
    bases = [c.__name__ for c in type(x).__mro__ if c.__module__.startswith("flax.nnx")]
    return not {"Module", "Object", "Pytree"}.isdisjoint(bases)
