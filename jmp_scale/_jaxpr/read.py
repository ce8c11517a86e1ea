"""Reads jaxprs: types of variables, nested jaxprs and loops.

The parameters of JAX's higher-order primitives are not a public interface and change
between releases, so their layout is inferred from shapes if possible. Other equations
are opaque.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._types import Leaf
from .hijax import box_of, boxed_rule, params_of

Atom = Var | Literal
Program = Jaxpr | ClosedJaxpr  # jax 0.12 has one kind only

# What a size that is symbolic (`jax.export`) counts as: several, so that an axis of a
# batch is not taken for one row, and a sum over it is small.
_SYMBOLIC_SIZE = 8
_text = functools.cache(str)  # NumPy needs a microsecond for the name of a dtype


class Loop(NamedTuple):
    """A scan or while: its body, and the layout of its operands."""

    body: Program  # runs in each iteration
    consts: int  # number of leading inputs that are equal in all iterations
    carry: int  # number of following inputs, which the previous iteration computes
    offset: int  # position of the body's first input among the equation's operands
    trips: int | None  # number of iterations; None if it depends on the data

    @property
    def carries(self) -> list[Var]:
        """The variables of the body that the previous iteration computes."""
        inner, _ = open_jaxpr(self.body)
        return inner.invars[self.consts : self.consts + self.carry]


def is_literal(atom: Atom) -> TypeGuard[Literal]:
    """Whether an input of an equation is a literal."""
    return isinstance(atom, Literal)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the atoms that are not literals."""
    return [v for v in atoms if isinstance(v, Var)]


def shape(atom: Atom) -> tuple[int, ...]:
    """Returns the shape of a variable; () if its type has none."""
    dims = getattr(atom.aval, "shape", ())
    return tuple(d if isinstance(d, int) else _SYMBOLIC_SIZE for d in dims)


def size(atom: Atom) -> int:
    """Returns the number of elements of a variable; 1 if its type has no shape."""
    return math.prod(shape(atom))


def dtype_of(atom: Atom) -> np.dtype:
    """Returns the dtype of a variable that is an array."""
    aval: Any = atom.aval
    return aval.dtype


def bytes_per_entry(atom: Atom) -> int:
    """Returns bytes per element; 8 if the dtype has no itemsize, such as a PRNG key."""
    return getattr(getattr(atom.aval, "dtype", None), "itemsize", 8)


def dtype_name(atom: Atom) -> str:
    """Returns the name of a dtype, such as "float16"; "" if the type has none."""
    return _text(getattr(atom.aval, "dtype", ""))


def is_float32(atom: Atom) -> bool:
    """Whether a variable has the dtype float32."""
    return dtype_name(atom) == "float32"


def is_floating(atom: Atom) -> bool:
    """Whether a variable has a real or complex floating-point dtype of any width."""
    return "float" in dtype_name(atom) or "complex" in dtype_name(atom)


def constant(value: object) -> np.ndarray | None:
    """Returns a constant of up to 65,536 elements as float64; None for others."""
    with contextlib.suppress(Exception):
        if getattr(value, "size", 1) <= 65_536:
            array = np.asarray(value)
            if array.dtype.kind in "biuf" or array.dtype.name == "bfloat16":
                return array.astype(np.float64)
    return None


def has_infinite_entries(value: Leaf) -> bool:
    """Whether a constant of any size is known to have infinite elements."""
    with contextlib.suppress(Exception):
        return bool(np.isinf(value).any())
    return False


def bare(jaxpr: Program) -> Jaxpr:
    """Returns a jaxpr without the values of its constants."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def open_jaxpr(jaxpr: Program) -> tuple[Jaxpr, list[Leaf]]:
    """Returns a bare jaxpr and the values of its constants, None if unknown."""
    inner = bare(jaxpr)
    consts = list(getattr(jaxpr, "consts", ()) or ())
    # A bare jaxpr has variables for its constants, but no values.
    if len(consts) != len(inner.constvars):
        consts = [None] * len(inner.constvars)
    return inner, consts


def is_jaxpr(value: object) -> TypeGuard[Program]:
    """Whether a parameter of an equation is a jaxpr."""
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def is_no_sequence(value: object) -> bool:
    """Whether a parameter of an equation is a leaf; lists are searched."""
    return not isinstance(value, (tuple, list))


def is_reference(atom: Atom) -> bool:
    """Whether a variable is a reference to an array, which equations write."""
    return hasattr(atom.aval, "inner_aval")


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than to return results; `Scan3` does not say it."""
    return bool(eqn.effects) or any(map(is_reference, variables(eqn.invars)))


def subjaxprs(eqn: JaxprEqn) -> list[Program]:
    """Returns all jaxprs among the parameters of an equation."""
    values = jax.tree.leaves([*params_of(eqn).values()], is_leaf=is_no_sequence)
    # An object of hijax contains the result of `jax.jit(f).trace`.
    traced = jax.stages.Traced
    opened = (x.jaxpr if isinstance(x, traced) else x for x in values)
    return [*filter(is_jaxpr, opened)]


def equations(jaxpr: Program) -> Iterator[JaxprEqn]:
    """Yields all equations of a jaxpr, including those of nested jaxprs."""
    for eqn in bare(jaxpr).eqns:
        yield eqn
        yield from equations_within(eqn)


def equations_within(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields all equations of an equation's nested jaxprs."""
    for nested in subjaxprs(eqn):
        yield from equations(nested)


def fits(jaxpr: Program, inputs: int, outputs: int) -> bool:
    """Whether a nested jaxpr has these numbers of inputs and outputs."""
    inner = bare(jaxpr)
    return len(inner.invars) == inputs and len(inner.outvars) == outputs


def name_of_call(eqn: JaxprEqn) -> str:
    """Returns the name of the function that an equation calls, "" if unknown."""
    (inner, *_) = map(bare, subjaxprs(eqn))
    return params_of(eqn).get("name") or getattr(inner.debug_info, "func_name", "")


def loop_of(eqn: JaxprEqn) -> Loop | None:
    """Returns the layout of a scan or while; None for other or opaque equations."""
    if eqn.primitive.name == "while":
        return Loop(
            body=eqn.params["body_jaxpr"],
            consts=eqn.params["body_nconsts"],
            carry=len(eqn.outvars),
            offset=eqn.params["cond_nconsts"],
            trips=None,
        )
    return _scan_layout(eqn) if eqn.primitive.name == "scan" else None


def _scan_layout(eqn: JaxprEqn) -> Loop | None:
    bodies = subjaxprs(eqn)
    if len(bodies) != 1 or not fits(bodies[0], len(eqn.invars), len(eqn.outvars)):
        return None
    inner = bare(bodies[0])
    # Scanned operands and stacked results have one more axis outside than inside.
    pairs = zip(eqn.invars, inner.invars, strict=True)
    same_in = [shape(a) == shape(b) for a, b in pairs]
    pairs = zip(eqn.outvars, inner.outvars, strict=True)
    same_out = [shape(a) == shape(b) for a, b in pairs]
    held, carry = sum(same_in), sum(same_out)
    # The order is consts, carries, scanned. Any other layout is not known here.
    if not (all(same_in[:held]) and all(same_out[:carry]) and carry <= held):
        return None
    return Loop(
        body=bodies[0],
        consts=held - carry,
        carry=carry,
        offset=0,
        trips=eqn.params["length"],
    )


class Rule(NamedTuple):
    """The rule of a custom_jvp call: (primals, tangents) to results and tangents."""

    jaxpr: ClosedJaxpr
    zeros: Sequence[bool]  # the results without a tangent, which the jaxpr leaves out


def jvp_rule(eqn: JaxprEqn) -> Rule | None:
    """Returns the rule of a custom_jvp call; None if it cannot be read."""
    with contextlib.suppress(Exception):
        if (box := box_of(eqn)) is not None:
            return Rule(boxed_rule(box), [False] * len(eqn.outvars))
        # JAX asks of each tangent whether it is zero; the rule is traced for no zeros.
        primals = len(eqn.invars) - eqn.params["num_consts"]
        traced = eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * primals)
        jaxpr, consts, zeros = traced
        return Rule(ClosedJaxpr(bare(jaxpr), consts), zeros)
    return None


def mesh_size(eqn: JaxprEqn) -> int:
    """Returns the number of devices of a `shard_map`; 1 for other equations."""
    is_map = eqn.primitive.name == "shard_map"
    return eqn.params["mesh"].size if is_map else 1
