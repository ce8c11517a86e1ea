"""Checks the traced program of a step on several devices, which no call shows."""

from collections.abc import Iterator

import jax

from ..._jaxpr import (
    Jaxpr,
    JaxprEqn,
    Program,
    bare,
    dtype_name,
    equations,
    equations_within,
    shape,
    subjaxprs,
    variables,
)
from ..._tree import FlatCall
from ..._types import Leaf
from .step_found import Check, Found

_SUMS = ("psum", "reduce_scatter", "psum_scatter")


def program(check: Check) -> Iterator[Found]:
    """Checks sums and agreements over devices."""
    arrays = [x for x in check.base.after.values() if isinstance(x, jax.Array)]
    if all(len(x.sharding.device_set) == 1 for x in arrays):
        return
    try:
        call = FlatCall(check.calls.step, check.calls.arguments.copies({}), {})
        traced = jax.make_jaxpr(call)(*call.arrays)
    except Exception as error:
        why = f"the step cannot be traced ({type(error).__name__})"
        check.not_checked.append(f"sums and agreements over devices: {why}")
        return
    shapes = {shape for x in arrays if x.ndim for shape in _local_shapes(x)}
    for dtype in _half_sums(traced, shapes):
        level = "note" if dtype == "bfloat16" else None  # it may be chosen for the wire
        yield Found("half-precision sum", "", level, {"dtype": dtype})
    # pmap's axis splits S too, into a row for each replica.
    run, ours = check.base, check.calls.is_ours
    split = {axis for p, x in run.after.items() if not ours(p) for axis in _axes(x)}
    split -= {axis for p, x in run.after.items() if ours(p) for axis in _axes(x)}
    for eqn in equations(traced):
        if eqn.primitive.name == "shard_map" and not eqn.params.get("check_vma", True):
            for axis in sorted(split - _agreed(bare(eqn.params["jaxpr"]))):
                if axis in eqn.params["mesh"].axis_names:
                    yield Found("skip not agreed", "", None, {"axis": repr(axis)})


def _local_shapes(x: jax.Array) -> set[tuple[int, ...]]:
    local = x.sharding.shard_shape(x.shape)
    return {x.shape, local, local[1:]}  # of pmap without the axis of devices


def _axes(x: Leaf) -> set[str]:
    spec = getattr(getattr(x, "sharding", None), "spec", ())
    return {axis for entry in spec for axis in _names(entry)}


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _half_sums(traced: Program, shapes: set[tuple[int, ...]]) -> Iterator[str]:
    """Finds sums in half precision of float32 values that were just unscaled."""
    body = bare(traced)
    makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    for eqn in body.eqns:
        for inner in subjaxprs(eqn):
            yield from _half_sums(inner, shapes)
        if not eqn.primitive.name.startswith(_SUMS):
            continue
        for var in variables(eqn.invars):
            cast = makers.get(var)
            if cast is None or cast.primitive.name != "convert_element_type":
                continue
            made = [
                makers[v].primitive.name for v in variables(cast.invars) if v in makers
            ]
            is_unscaled = made in (["mul"], ["div"])
            is_half = dtype_name(var) in ("float16", "bfloat16")
            if is_unscaled and is_half and shape(var) in shapes:
                yield dtype_name(var)


def _agreed(body: Jaxpr) -> set[str]:
    """Returns the axes over which the values behind boolean scalars are reduced."""
    needed = {
        var
        for var in variables(body.outvars)
        if dtype_name(var) == "bool" and not shape(var)
    }
    agreed: set[str] = set()
    for eqn in reversed(body.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(variables(eqn.invars))
            for part in (eqn, *equations_within(eqn)):
                agreed |= _reduced_axes(part)
    return agreed


def _reduced_axes(eqn: JaxprEqn) -> set[str]:
    if any(shape(atom) for atom in eqn.invars):
        return set()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return set(axes) if isinstance(axes, tuple) else {axes}
