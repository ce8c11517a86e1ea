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
    variables,
)
from ..._tree import FlatCall
from .step_applied import devices_of
from .step_calls import Check

_SUMS = ("psum", "reduce_scatter", "psum_scatter")
_UNSCALED = ("mul", "div")


def program(check: Check) -> None:
    """Checks sums and agreements over devices."""
    arrays = {p: x for p, x in check.base.after.items() if isinstance(x, jax.Array)}
    if all(devices_of(x) == 1 for x in arrays.values()):
        return
    try:
        call = FlatCall(check.step, check.copies({}), {})
        traced = jax.make_jaxpr(call)(*call.arrays)
    except Exception as error:
        why = f"the step cannot be traced ({type(error).__name__})"
        check.not_checked.append(f"sums and agreements over devices: {why}")
        return
    shapes: set[tuple[int, ...]] = set()
    split: set[str] = set()
    with_s: set[str] = set()  # pmap's axis splits S too, into a row for each replica
    for path, x in arrays.items():
        local = x.sharding.shard_shape(x.shape)
        shapes |= {x.shape, local, local[1:]} if x.ndim else set()
        axes = jax.tree.leaves(tuple(getattr(x.sharding, "spec", ())))
        (with_s if check.is_ours(path) else split).update(axes)
    for dtype in _half_sums(traced, shapes):
        # A bfloat16 may be chosen for the wire.
        check.add("half-precision sum", "", dtype != "bfloat16", dtype=dtype)
    for eqn in equations(traced):
        if eqn.primitive.name == "shard_map" and not eqn.params.get("check_vma", True):
            for axis in sorted(split - with_s - _agreed(bare(eqn.params["jaxpr"]))):
                if axis in eqn.params["mesh"].axis_names:
                    check.add("skip not agreed", axis=repr(axis))


def _half_sums(traced: Program, shapes: set[tuple[int, ...]]) -> Iterator[str]:
    """Finds sums in half precision of float32 values that were just unscaled."""
    eqns = list(equations(traced))
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    for eqn in eqns:
        if not eqn.primitive.name.startswith(_SUMS):
            continue
        for var in variables(eqn.invars):
            cast = makers.get(var)
            if cast is None or cast.primitive.name != "convert_element_type":
                continue
            made = [makers.get(source) for source in variables(cast.invars)]
            names = [maker.primitive.name for maker in made if maker is not None]
            is_half = dtype_name(var) in ("float16", "bfloat16")
            if is_half and shape(var) in shapes and names and names[0] in _UNSCALED:
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
