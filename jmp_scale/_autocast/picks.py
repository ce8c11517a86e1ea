"""Picks: gathers of one entry of each row, such as the label's logit in a loss.

JAX differentiates a gather by a scatter into zeros, which no compiler fuses: the whole
gradient of the logits is written in float32. A comparison fuses with the softmax around
it, in both passes:

```
picked[row] = sum(where(arange(size) == label[row], x[row], 0))
```

Its value is the gather's, except that -0.0 becomes 0.0. Proven is that every index but
one counts the rows, as a batch of the gather does, or a column whose values are known
and `jnp.arange`. Every mode of a gather has its own value and gradient out of bounds.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jaxpr
from .._jaxpr import Atom, JaxprEqn, Var
from .._types import PyTree
from .derivatives import Replacement, linear

Maker = Callable[[Atom], JaxprEqn | None]
_MODES = "CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS"
# Indices of more entries or equations are not computed while a program is read.
_MOST_INDICES = 2**22
_MOST_EQUATIONS = 64
# How indices such as `jnp.arange(n)[:, None]` are computed, besides moves.
_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "convert_element_type": np.array,
    "copy": np.array,
    "lt": np.less,
    "reshape": np.array,
    "squeeze": np.array,
    "select_n": lambda which, *cases: np.choose(which, cases, mode="clip"),
}


class Pick(NamedTuple):
    """Which entry of each row of an array is picked."""

    axis: int  # of the array: a row lies along it
    column: int  # of the indices, in their last dimension: the labels
    # Dimensions of the labels: those of the array's other axes, then any of size 1.
    dimensions: tuple[int, ...]
    mode: str  # what is out of bounds: see `picked`
    fill: float
    shape: tuple[int, ...]  # of the result


def may_pick(eqn: JaxprEqn) -> bool:
    """Whether an equation gathers single entries of a floating-point array."""
    if _jaxpr.name_of(eqn) != "gather" or not _jaxpr.is_floating(eqn.invars[0]):
        return False
    return {*eqn.params["slice_sizes"]} == {1} and eqn.params["mode"].name in _MODES


def has_picks(eqn: JaxprEqn) -> bool:
    """Whether nested jaxprs gather single entries of floating-point arrays."""
    return any(map(may_pick, _jaxpr.equations_within(eqn)))


def as_pick(
    eqn: JaxprEqn, maker_of: Maker, constants: Mapping[Var, PyTree]
) -> JaxprEqn:
    """Returns an equation that compares, or `eqn` if it does not pick one of each row.

    `maker_of` finds the equation of a variable, `constants` has the values of others.
    """
    pick = _pick_of(eqn, maker_of, constants)
    params = {"pick": pick}
    return eqn.replace(primitive=_PICK, params=params) if pick else eqn


def _pick_of(
    eqn: JaxprEqn, maker_of: Maker, constants: Mapping[Var, PyTree]
) -> Pick | None:
    sizes, rows = _dims(eqn.invars[0]), _dims(eqn.invars[1])[:-1]
    start_indices = eqn.params["dimension_numbers"].start_index_map
    columns = {int(axis): i for i, axis in enumerate(start_indices)}
    counted = _counted(eqn, columns, maker_of, constants)
    picked = columns.keys() - counted
    left = {axis for axis, n in enumerate(sizes) if n != 1}.difference(counted, columns)
    if len(picked) != 1 or left or len(sizes) < 2:
        return None
    dimensions = [counted[axis] for axis in sorted(counted)]
    dimensions += [d for d, n in enumerate(rows) if d not in dimensions and n == 1]
    if sorted(dimensions) != [*range(len(rows))]:
        return None  # another dimension of the indices repeats a row
    (axis,) = picked
    shape = _dims(eqn.outvars[0])
    mode, fill = eqn.params["mode"].name, eqn.params["fill_value"]
    fill = np.nan if fill is None else fill
    return Pick(axis, columns[axis], (*dimensions,), mode, fill, shape)


def _counted(
    eqn: JaxprEqn,
    columns: Mapping[int, int],
    maker_of: Maker,
    constants: Mapping[Var, PyTree],
) -> dict[int, int]:
    """Returns axes of the array, with the dimension of the indices that counts there.

    These are batches of the gather, and axes of which a column holds `jnp.arange`.
    """
    numbers, (x, indices) = eqn.params["dimension_numbers"], eqn.invars
    batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    found = {int(axis): int(d) for axis, d in zip(*batching, strict=True)}
    parts = _concatenated(indices, maker_of) if len(columns) > 1 else []
    known: dict[Atom, np.ndarray | None] = {}
    for axis, part in zip(columns, parts, strict=False):
        value = _computed(part, maker_of, constants, known)
        for d, size in enumerate(_dims(indices)[:-1]):
            if size == _dims(x)[axis] and _counts_along(value, d):
                found[axis] = d
    return found


def _concatenated(indices: Atom, maker_of: Maker) -> list[Atom]:
    """Returns the arrays of one column each that indices are put together of."""
    maker = maker_of(indices)
    parts = maker.invars if maker and _jaxpr.name_of(maker) == "concatenate" else []
    return parts if all(_jaxpr.shape(part)[-1] == 1 for part in parts) else []


def _counts_along(column: np.ndarray | None, d: int) -> bool:
    """Whether a column of indices is `jnp.arange` along one of its dimensions."""
    if column is None:
        return False
    size, *others = column.shape[d:]
    counts = np.arange(size).reshape(size, *[1] * len(others))
    return np.array_equal(counts + 0 * column, column)


def _dims(v: Atom) -> tuple[Any, ...]:
    """Returns the shape of an array, with sizes that are symbolic."""
    aval: Any = v.aval
    return aval.shape


def _computed(
    v: Atom,
    maker_of: Maker,
    constants: Mapping[Var, PyTree],
    known: dict[Atom, np.ndarray | None],
) -> np.ndarray | None:
    """Returns indices that no input changes, such as `jnp.arange(n)`; else None.

    `known` has those that were computed before: an index may be read many times.
    """
    shape = _dims(v)
    if shape != _jaxpr.shape(v) or _jaxpr.size(v) > _MOST_INDICES:
        return None
    eqn = maker_of(v)
    if eqn is None:
        value = _jaxpr.constant(constants.get(v) if isinstance(v, Var) else v.val)
        return None if value is None else value.astype(_jaxpr.dtype_of(v))
    if v not in known and len(known) < _MOST_EQUATIONS:
        known[v] = None
        values = [_computed(each, maker_of, constants, known) for each in eqn.invars]
        known[v] = _in_numpy(eqn, values)
    return known.get(v)


def _in_numpy(eqn: JaxprEqn, values: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Computes an equation as indices are computed; None if it is another one.

    Its dtype is the equation's, in which a count of many rows may wrap.
    """
    operands = [value for value in values if value is not None]
    if len(operands) < len(values):
        return None
    name, params, (result,) = _jaxpr.name_of(eqn), eqn.params, eqn.outvars
    shape, dtype = _dims(result), _jaxpr.dtype_of(result)
    if name == "iota":
        return np.indices(shape)[params["dimension"]].astype(dtype)
    if name == "broadcast_in_dim":
        own = params["broadcast_dimensions"]
        added = [d for d in range(len(shape)) if d not in own]
        return np.broadcast_to(np.expand_dims(operands[0], tuple(added)), shape)
    if name not in _NUMPY or params.get("dimensions") is not None:  # of a reshape
        return None
    return _NUMPY[name](*operands).reshape(shape).astype(dtype)


def picked(x: jax.Array, indices: jax.Array, pick: Pick) -> jax.Array:
    """Picks entries of `x`, whose derivative saves the indices alone.

    Out of bounds it is the nearest entry, with its gradient if the mode is CLIP, and
    without one if it is PROMISE_IN_BOUNDS. FILL_OR_DROP has a value of its own.
    """
    rows = [n for axis, n in enumerate(x.shape) if axis != pick.axis]
    size = x.shape[pick.axis]
    labels = indices[..., pick.column].transpose(pick.dimensions).reshape(rows)
    if labels.dtype.itemsize < np.dtype("int32").itemsize:
        labels = labels.astype("int32")
    is_inside = (labels >= 0) & (labels < size)
    if pick.mode != "FILL_OR_DROP":
        labels = jnp.clip(labels, 0, size - 1)
    found = linear(functools.partial(_entries, axis=pick.axis), labels, x)
    if pick.mode != "CLIP":
        is_filled = pick.mode == "FILL_OR_DROP"
        fill = x.dtype.type(pick.fill) if is_filled else jax.lax.stop_gradient(found)
        found = jnp.where(is_inside, found, fill)
    order = np.argsort(pick.dimensions)
    shape = [indices.shape[d] for d in pick.dimensions]
    return found.reshape(shape).transpose(order).reshape(pick.shape)


_PICK = Replacement("pick", picked)


def _entries(labels: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    labels = jnp.expand_dims(labels, axis)
    others = [d for d in range(x.ndim) if d != axis]
    places = jnp.expand_dims(jnp.arange(x.shape[axis], dtype=labels.dtype), others)
    return jnp.sum(jnp.where(places == labels, x, 0), axis)
