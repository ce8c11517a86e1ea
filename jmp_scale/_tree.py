"""Questions to and choices between the leaves of pytrees."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from . import _mesh

T = TypeVar("T")


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf holds real or complex floating-point numbers, so that it can be scaled."""
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def named_inexact_leaves(tree: Any) -> tuple[tuple[str, ...], list[Any]]:
    """Paths and leaves of those leaves of a tree that hold floating-point numbers."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    pairs = [
        (jax.tree_util.keystr(path), leaf) for path, leaf in pairs if is_inexact(leaf)
    ]
    return tuple(path for path, _ in pairs), [leaf for _, leaf in pairs]


def widen(tree: T) -> T:
    """Casts inexact leaves narrower than 32 bits to float32; all others pass unchanged."""

    def widen_leaf(leaf: Any) -> Any:
        narrow = is_inexact(leaf) and jnp.result_type(leaf).itemsize < 4
        return jnp.asarray(leaf).astype(jnp.float32) if narrow else leaf

    return jax.tree.map(widen_leaf, tree)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts real floating-point arrays to `dtype`; all other leaves pass unchanged."""

    def cast_leaf(leaf: Any) -> Any:
        is_array = isinstance(leaf, (np.ndarray, np.generic, jax.Array))
        return (
            leaf.astype(dtype)
            if is_array and jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
        )

    return jax.tree.map(cast_leaf, tree)


def all_finite(
    tree: Any, axis_name: _mesh.AxisName = None, *, specs: Any = None, mesh: Any = None
) -> jax.Array:
    """Whether no entry of any leaf is NaN or infinite, with one answer for all replicas.

    Only inexact leaves (real or complex floating point) are looked at.

    Args:
      tree: any pytree.
      axis_name: mesh axes over which the answer must agree. None (default) finds by itself every
        manual axis (`pmap`, `shard_map`) on which it may differ, so that replicas cannot diverge; a
        name or tuple of names is used as it is (`vmap(axis_name=)` needs it); `()` opts out.
      specs: a `PartitionSpec` for each leaf of `tree` (or for a prefix of it), for auto-sharded `jit`:
        each device then looks at its own shards, and exactly one scalar all-reduce joins the answers.
        Without specs XLA reduces one boolean per leaf, combined into one all-reduce. Not needed on
        Explicit mesh axes, where an array's type holds its spec.
      mesh: the mesh of `specs`; default that of `jax.set_mesh`.

    Returns:
      bool[], True for a tree without inexact leaves.

    Raises:
      TypeError: a leaf of `specs` is no `PartitionSpec`.
      ValueError: `mesh` without `specs`, `specs` that do not fit `tree` or name an axis that the mesh
        does not have, or no mesh to be found.

    Example:
      >>> import jax.numpy as jnp, jmp_scale
      >>> bool(jmp_scale.all_finite({"w": jnp.array([1.0, jnp.inf]), "step": jnp.array(3)}))
      False
    """
    if specs is None and mesh is not None:
        raise ValueError(
            "all_finite: mesh is given without specs, the PartitionSpecs of the leaves"
        )
    looked_at = [is_inexact(leaf) for leaf in jax.tree.leaves(tree)]
    leaves = [
        jnp.asarray(leaf)
        for leaf in itertools.compress(jax.tree.leaves(tree), looked_at)
    ]
    if specs is None:
        leaf_specs = _mesh.sharding_specs(leaves)
    else:
        leaf_specs = list(itertools.compress(_spec_leaves(specs, tree), looked_at))
    return _mesh.agree(
        _mesh.on_shards(_all_finite_here, leaves, leaf_specs, mesh), axis_name
    )


def _all_finite_here(leaves: Sequence[jax.Array]) -> jax.Array:
    if not leaves:
        return jnp.array(True)
    in_one_pass = _mesh.has_whole_arrays() and jax.default_backend() == "cpu"
    flags_of = (
        _flags_in_one_pass if in_one_pass else lambda leaf: [jnp.isfinite(leaf).all()]
    )
    flags = jnp.stack([flag for leaf in leaves for flag in flags_of(leaf)])
    # The barrier keeps XLA from fusing this reduction into each of the update's kernels, which makes
    # compile time quadratic in the number of leaves.
    return jnp.all(lax.optimization_barrier(flags))


def _flags_in_one_pass(leaf: jax.Array) -> Sequence[jax.Array]:
    """`jnp.isfinite(leaf).all()`, twice, for a CPU.

    XLA:CPU (of jax 0.10) writes a boolean for each entry to memory, and splits their reduction in several.
    A reduction of two operands it leaves whole, and computes `isfinite` within it, if both results are
    used: no temporaries (test_there_are_hardly_any_temporaries). Over one axis, since it is slow over
    several short ones. Not for sharded arrays: XLA gathers both results of each leaf.
    """
    finite = jnp.isfinite(leaf).ravel()
    return lax.reduce(
        (finite, finite), (np.bool_(True), np.bool_(True)), _and_pairwise, (0,)
    )


def _and_pairwise(
    x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array]
) -> Any:
    return x[0] & y[0], x[1] & y[1]


def _spec_leaves(specs: Any, tree: Any) -> list[PartitionSpec]:
    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    try:
        leaves = jax.tree.leaves(
            jax.tree.broadcast(specs, tree, is_leaf=is_spec), is_leaf=is_spec
        )
    except ValueError as error:
        message = f"all_finite: expected specs of the structure of tree or of a prefix of it: {error}"
        raise ValueError(message) from None
    wrong = [leaf for leaf in leaves if not is_spec(leaf)]
    if wrong:
        raise TypeError(
            f"all_finite: expected a PartitionSpec for each leaf in specs, got {wrong[0]!r}"
        )
    return leaves


def select_tree(pred: ArrayLike, on_true: T, on_false: T) -> T:
    """Chooses one of two equal-typed pytrees, leaf by leaf, without branching (`jnp.where`).

    Arrays, NumPy arrays, typed PRNG keys and Python numbers are selected. Leaves that are no data
    (functions, strings) pass, and must be the same on both sides.

    Args:
      pred: bool[], typically `all_finite(grads)`.
      on_true: pytree taken where `pred`, e.g. the updated state.
      on_false: pytree taken otherwise, e.g. the state before the step.

    Returns:
      A pytree of the same structure, shapes and dtypes.

    Raises:
      ValueError: `pred` is no boolean scalar, or the trees differ in structure, shape or dtype:
        nothing is ever broadcast or promoted.

    Example:
      >>> import jax.numpy as jnp, jmp_scale
      >>> new, old = {"w": jnp.array(2.0)}, {"w": jnp.array(1.0)}
      >>> float(jmp_scale.select_tree(jnp.array(False), new, old)["w"])
      1.0
    """
    if jnp.shape(pred) != () or jnp.result_type(pred) != jnp.bool_:
        got = f"{jnp.result_type(pred)}{list(jnp.shape(pred))}"
        raise ValueError(f"select_tree: expected boolean scalar as pred, got {got}")
    paths, treedef = jax.tree_util.tree_flatten_with_path(on_true)
    old_leaves, old_treedef = jax.tree.flatten(on_false)
    if treedef != old_treedef:
        raise ValueError(
            "select_tree: on_true and on_false must have the same structure, got\n"
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
    if not (_is_data(on_true) and _is_data(on_false)):
        if type(on_true) is type(on_false) and on_true == on_false:
            return on_false
        raise ValueError(
            f"{where} is no array and differs, so it cannot be selected: "
            f"on_true {on_true!r}, on_false {on_false!r}"
        )
    new, old = (jax.typeof(x) for x in (on_true, on_false))
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{where} has shape {new.shape} and dtype {new.dtype} in on_true, but {old.shape} and "
            f"{old.dtype} in on_false; reshape or cast one of them: nothing is promoted here"
        )
    return (
        on_false
        if new.dtype == jax.dtypes.float0
        else jnp.where(pred, on_true, on_false)
    )


def _is_data(leaf: Any) -> bool:
    return isinstance(
        leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    )
