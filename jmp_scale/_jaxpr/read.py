"""Reads traced programs: types of variables, nested jaxprs and loops.

The parameters of JAX's higher-order primitives are not an interface and change between
releases, so their layout is inferred from shapes where that is possible. What cannot be
read is reported as not looked into.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .hijax import box_of, boxed_rule, params_of

Atom = Var | Literal
Program = Jaxpr | ClosedJaxpr  # jax 0.12 has one kind only

# What a size that is symbolic (`jax.export`) counts as: several, so that an axis of a
# batch is not taken for one row, and a sum over it is small.
_SYMBOLIC_SIZE = 8
_text = functools.cache(str)  # the name of a dtype takes NumPy a microsecond


class Loop(NamedTuple):
    """A scan or while: its body, and how its operands are laid out."""

    body: Program  # runs in each iteration
    consts: int  # leading inputs that are the same in each iteration
    carry: int  # inputs after these, which an iteration hands to the next
    offset: int  # position of the body's first input among the equation's operands
    trips: int | None  # iterations; None if their number depends on the data

    @property
    def carries(self) -> list[Var]:
        """The variables of the body that an iteration hands to the next."""
        inner, _ = open_jaxpr(self.body)
        return inner.invars[self.consts : self.consts + self.carry]


def is_literal(atom: Atom) -> TypeGuard[Literal]:
    """Whether an input of an equation is a number in the program text."""
    return isinstance(atom, Literal)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are not literals."""
    return [v for v in atoms if isinstance(v, Var)]


def shape(atom: Atom) -> tuple[int, ...]:
    """Shape of a variable, () if its type has none."""
    dims = getattr(atom.aval, "shape", ())
    return tuple(d if isinstance(d, int) else _SYMBOLIC_SIZE for d in dims)


def size(atom: Atom) -> int:
    """Number of entries of a variable; 1 if its type has no shape."""
    return math.prod(shape(atom))


def dtype_of(atom: Atom) -> Any:
    """Dtype of a variable that is an array."""
    aval: Any = atom.aval
    return aval.dtype


def bytes_per_entry(atom: Atom) -> int:
    """Size of a variable's dtype; 8 bytes where that has none, as a random key."""
    return getattr(getattr(atom.aval, "dtype", None), "itemsize", 8)


def dtype_name(atom: Atom) -> str:
    """Name of a variable's dtype, such as "float16"; "" if its type has none."""
    return _text(getattr(atom.aval, "dtype", ""))


def is_float32(atom: Atom) -> bool:
    return dtype_name(atom) == "float32"


def is_floating(atom: Atom) -> bool:
    """Whether a variable or number is of a real or complex dtype, of any width."""
    return "float" in dtype_name(atom) or "complex" in dtype_name(atom)


def constant(value: object) -> np.ndarray | None:
    """A constant of up to 65,536 entries as a float64 array; None if it is another."""
    with contextlib.suppress(Exception):
        if getattr(value, "size", 1) <= 65_536:
            array = np.asarray(value)
            if array.dtype.kind in "biuf" or array.dtype.name == "bfloat16":
                return array.astype(np.float64)
    return None


def has_infinite_entries(value: Any) -> bool:
    """Whether a constant of any size is known to have infinite entries."""
    with contextlib.suppress(Exception):
        return bool(np.isinf(value).any())
    return False


def bare(jaxpr: Program) -> Jaxpr:
    """A jaxpr without the values of its constants."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def open_jaxpr(jaxpr: Program) -> tuple[Jaxpr, list[Any]]:
    """A jaxpr and the values of its constants, None where they are unknown."""
    inner = bare(jaxpr)
    consts = list(getattr(jaxpr, "consts", ()) or ())
    # A bare jaxpr names its constants without their values.
    if len(consts) != len(inner.constvars):
        consts = [None] * len(inner.constvars)
    return inner, consts


def is_jaxpr(value: object) -> TypeGuard[Program]:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def is_no_sequence(value: object) -> bool:
    """Whether a parameter of an equation is taken as a whole; lists are searched."""
    return not isinstance(value, (tuple, list))


def is_reference(atom: Atom) -> bool:
    """Whether a variable is a reference to an array, which equations write."""
    return hasattr(atom.aval, "inner_aval")


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than to return results; `Scan3` does not say it."""
    return bool(eqn.effects) or any(map(is_reference, variables(eqn.invars)))


def subjaxprs(eqn: JaxprEqn) -> list[Program]:
    """All jaxprs among the parameters of an equation, whatever their names."""
    values = jax.tree.leaves([*params_of(eqn).values()], is_leaf=is_no_sequence)
    # An object of hijax holds what `jax.jit(f).trace` returns.
    traced = jax.stages.Traced
    opened = (x.jaxpr if isinstance(x, traced) else x for x in values)
    return [*filter(is_jaxpr, opened)]


def equations(jaxpr: Program) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr, including those of the jaxprs within them."""
    for eqn in bare(jaxpr).eqns:
        yield eqn
        yield from equations_within(eqn)


def equations_within(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """All equations of the jaxprs within an equation."""
    for nested in subjaxprs(eqn):
        yield from equations(nested)


def fits(jaxpr: Program, inputs: int, outputs: int) -> bool:
    """Whether a nested jaxpr has these numbers of inputs and outputs."""
    inner = bare(jaxpr)
    return len(inner.invars) == inputs and len(inner.outvars) == outputs


def name_of_call(eqn: JaxprEqn) -> str:
    """Name of the function that an equation calls, "" if unknown."""
    (inner, *_) = map(bare, subjaxprs(eqn))
    return params_of(eqn).get("name") or getattr(inner.debug_info, "func_name", "")


def loop_of(eqn: JaxprEqn) -> Loop | None:
    """The layout of a scan or while equation; None if it is another or unreadable."""
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
    # Scanned operands and stacked results have one axis more outside than inside.
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
    """The rule of a custom_jvp call; None if unreadable."""
    with contextlib.suppress(Exception):
        if (box := box_of(eqn)) is not None:
            return Rule(boxed_rule(box), [False] * len(eqn.outvars))
        # JAX asks of each tangent whether it is zero: the rule is traced for none.
        primals = len(eqn.invars) - eqn.params["num_consts"]
        traced = eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * primals)
        jaxpr, consts, zeros = traced
        return Rule(ClosedJaxpr(bare(jaxpr), consts), zeros)
    return None


def mesh_size(eqn: JaxprEqn) -> int:
    """How many devices run the jaxpr of a `shard_map`; 1 for other equations."""
    is_map = eqn.primitive.name == "shard_map"
    return eqn.params["mesh"].size if is_map else 1
