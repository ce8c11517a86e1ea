"""Predicates on pytree leaves, casts, and selection between two pytrees."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

T = TypeVar("T")


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
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    pairs = [(path, leaf) for path, leaf in pairs if is_inexact(leaf)]
    return tuple(jax.tree_util.keystr(p) for p, _ in pairs), [leaf for _, leaf in pairs]


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
    paths, treedef = jax.tree_util.tree_flatten_with_path(on_true)
    old_leaves, old_treedef = jax.tree.flatten(on_false)
    if treedef != old_treedef:
        raise ValueError(
            "select_tree: expected on_true and on_false of the same structure, got\n"
            f"  on_true:  {treedef}\n  on_false: {old_treedef}"
        )
    leaves = [
        _select_leaf(pred, p, a, b) for (p, a), b in zip(paths, old_leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def _select_leaf(pred: ArrayLike, path: Any, on_true: Any, on_false: Any) -> Any:
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
            f"{where} has shape {new.shape} and dtype {new.dtype} in on_true, but "
            f"{old.shape} and {old.dtype} in on_false; reshape or cast one of them: "
            "nothing is promoted here"
        )
    if new.dtype == jax.dtypes.float0:
        return on_false
    return jnp.where(pred, on_true, on_false)


def is_data(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex))
