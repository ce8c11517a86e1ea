"""Objects of `jax.experimental.hijax`, read as the primitives that they replace.

Under `JAX_REMAT3`, `JAX_CUSTOM_JVP3` and the like (jax 0.12) checkpoints, functions
with rules and scans are equations of one primitive. Its parameter is an object, whose
class says which of them it is.
"""

from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters import ad

from .._types import PyTree

_REPLACED = {
    "RematTraced": "remat2",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "Scan3": "scan3",
    "AutocastProducts": "custom_jvp_call",  # our own, of `policies`
}


class Box(Protocol):
    """What is read of a `jax.experimental.hijax.HiPrim`, which jax 0.8 lacks."""

    params: dict[str, Any]
    in_avals_flat: list[ShapedArray]
    in_tree: PyTree
    out_tree: PyTree

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]: ...


def box_of(eqn: JaxprEqn) -> Box | None:
    """The object that an equation calls, None if it calls none."""
    return eqn.params.get("_prim")


def name_of(eqn: JaxprEqn) -> str:
    """The name of an equation's primitive, or of that which its object replaces."""
    return _REPLACED.get(type(box_of(eqn)).__name__, eqn.primitive.name)


def params_of(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation, or of the object that it calls."""
    box = box_of(eqn)
    return eqn.params if box is None else box.params


def boxed_rule(box: Box) -> ClosedJaxpr:
    """The rule of a function with a `custom_jvp`, of (primals, tangents)."""
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in box.in_avals_flat]

    def rule(*arrays: jax.Array) -> list[jax.Array]:
        sides = arrays[: len(types)], arrays[len(types) :]
        found = box.jvp(*(jax.tree.unflatten(box.in_tree, side) for side in sides))
        primals, tangents = map(box.out_tree.flatten_up_to, found)
        return [*primals, *map(ad.instantiate_zeros, tangents)]

    return jax.make_jaxpr(rule)(*types, *types)
