"""Traced programs: tables of primitives, what jaxprs hold, and their evaluation.

The parameters of JAX's higher-order primitives are not a public interface and change
between releases, so their layout is inferred from shapes if possible. Other equations
are opaque.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.source_info_util import NameStack
from jax.interpreters import ad

from ._policy import is_half
from ._types import PyTree

Atom = Var | Literal
ClosedProgram = ClosedJaxpr
Program = Jaxpr | ClosedProgram  # jax 0.12 has one kind only

# What a size that is symbolic (`jax.export`) counts as: several, so that an axis of a
# batch is not taken for one row, and a sum over it is small.
_SYMBOLIC_SIZE = 8
_text = functools.cache(str)  # NumPy needs a microsecond for the name of a dtype


def words(text: str) -> frozenset[str]:
    """Splits a text into a set of names."""
    return frozenset(text.split())


# Sets of primitives by their properties, by the names in a printed jaxpr. Each says who
# reads it, and which new primitives join it. tests/test_jaxpr.py lists what is in none.

# Matrix products and convolutions, which `autocast` casts. A new one joins if lower
# precision makes it faster: CONTRIBUTING.md, "A product primitive".
PRODUCTS = words("conv_general_dilated dot_general ragged_dot_general")
# Calls of a function without a custom derivative rule. `autocast` opens them, and
# diagnostics look for a NaN in them. A new one joins if its one jaxpr has its operands.
CALLS = words("closed_call eval_jaxpr jit")

# The result has each element of the only operand once, in another order or shape.
# `autocast` moves such an operation of an operand into the product that reads it.
REARRANGES = words("copy reshape rev sharding_constraint squeeze transpose")
# Elements of the result are elements of the first operand; the others say where. For
# `autocast` a slice of a weight is a weight, whatever chooses it.
LOOKUPS = words("dynamic_slice gather")
# Elements of the result are elements of the first operand, possibly cast. `autocast`
# looks through them for how an operand is stored, the precision report for a cast.
SAME_ENTRIES = REARRANGES | words("""
    broadcast_in_dim convert_element_type device_put dynamic_slice gather name
    optimization_barrier pbroadcast pvary reduce_precision slice stop_gradient tile
""")
# The result is linear in floating-point operands, so that no derivative reads them. The
# plan of `autocast` then does not save these.
LINEAR = REARRANGES | words("""
    add add_any broadcast_in_dim concatenate conj convert_element_type dynamic_slice
    gather imag name neg optimization_barrier pad pbroadcast pick pvary real reduce_sum
    reshard select_n slice split stack stop_gradient sub tile
""")
# The result counts as a parameter if an operand is a parameter. `autocast` asks it for
# a vector times a matrix: with a parameter it is one row of a batch.
SCALINGS = LINEAR | words("div mul")
# The result is cheaper to recompute than to save, which the plan of `autocast` does. A
# new primitive joins if it is elementwise, a sum or a move. `gather` is excluded: on a
# sharded table, recomputing it costs communication.
CHEAP = LINEAR - {"gather"} | words("""
    abs acos acosh and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type
    cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow iota is_finite le lgamma log log1p log2 logistic lt max min mul ne
    nextafter not one_minus_square or population_count pow reduce_and reduce_max
    reduce_min reduce_or reduce_precision reduce_prod rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor
""")
# Parts of the names of primitives that wait for a condition, or pass their operands to
# the host: io_callback, pure_callback, debug_callback, pallas_call. An update with one
# of them is a branch, which a skipped step does not take (`_scaling.skip`).
WAITS_OR_SHOWS = words("while cond check callback ffi_call custom_call pallas")

# Primitives of JAX that are not in any public module, and Equinox's primitives, which
# mark values and compute nothing. The precision report says of others that it does not
# read them. A new one joins if `jax.lax` does not have it.
_UNLISTED = words("""
    addupdate freeze new_ref pbroadcast platform_index psum_invariant pvary
    ragged_dot_general random_clone random_unwrap random_wrap reduce_scatter reshard
    scaled_dot shard_map unreduced_psum announce_jaxpr maybe_set nonbatchable
    nondifferentiable_backward nontraceable select_if_vmap unvmap_all unvmap_any
    unvmap_max vprim
""")


class OwnPrimitive(Primitive):
    """A primitive of ours, which is read like JAX's of the same name."""


@functools.cache
def _public_primitives() -> dict[str, Primitive]:
    # JAX has no list of its primitives, so they are collected from public modules.
    modules = jax.lax, jax.extend.core.primitives
    values = [value for module in modules for value in vars(module).values()]
    # That of `checkpoint_name` is in none of them on jax 0.8.
    named = jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(0.0)
    values += [e.primitive for e in named.eqns if e.primitive.name == "name"]
    return {value.name: value for value in values if isinstance(value, Primitive)}


def known_primitives() -> frozenset[str]:
    """Returns names of JAX's primitives; new and foreign primitives are opaque."""
    return _UNLISTED.union(_public_primitives())


@functools.cache
def _name(primitive: Primitive) -> str:
    """Returns the name of a primitive: proven is that it is JAX's, or ours.

    A foreign primitive that has the name of one of JAX's is opaque.
    """
    same = _public_primitives().get(primitive.name, primitive)
    is_known = primitive is same or isinstance(primitive, OwnPrimitive)
    return primitive.name if is_known else f"foreign {primitive.name}"


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


def any_half(atoms: Iterable[Atom]) -> bool:
    """Whether an array has half precision."""
    return any(is_half(dtype_name(atom)) for atom in atoms)


def is_floating(atom: Atom) -> bool:
    """Whether a variable has a real or complex floating-point dtype of any width."""
    return "float" in dtype_name(atom) or "complex" in dtype_name(atom)


def is_reference(atom: Atom) -> bool:
    """Whether a variable is a reference to an array, which equations write."""
    return hasattr(atom.aval, "inner_aval")


def constant(value: object, limit: float = 65_536) -> np.ndarray | None:
    """Returns a constant of up to `limit` elements as float64; None for others."""
    with contextlib.suppress(Exception):
        if getattr(value, "size", 1) <= limit:
            array = np.asarray(value)
            if array.dtype.kind in "biuf" or array.dtype.name == "bfloat16":
                return array.astype(np.float64)
    return None


def has_infinite_entries(value: PyTree) -> bool:
    """Whether a constant of any size is known to have infinite elements."""
    with contextlib.suppress(Exception):
        return bool(np.isinf(value).any())
    return False


def bare(jaxpr: Program) -> Jaxpr:
    """Returns a jaxpr without the values of its constants."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def open_jaxpr(jaxpr: Program) -> tuple[Jaxpr, list[PyTree]]:
    """Returns a bare jaxpr and the values of its constants, None if unknown."""
    inner = bare(jaxpr)
    consts = list(getattr(jaxpr, "consts", ()) or ())
    # A bare jaxpr has variables for its constants, but no values.
    if len(consts) != len(inner.constvars):
        consts = [None] * len(inner.constvars)
    return inner, consts


# Under `JAX_REMAT3`, `JAX_CUSTOM_JVP3` and the like (jax 0.12) checkpoints, functions
# with rules and scans are equations of one primitive. Its parameter is an object of
# `jax.experimental.hijax`, whose class says which of these primitives it replaces.
_BOX = "_prim"
_REPLACED = {
    "RematTraced": "remat2",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "Scan3": "scan3",
}


def name_of(eqn: JaxprEqn) -> str:
    """Returns the name of an equation's primitive, or of the one that it replaces."""
    name = _name(eqn.primitive)
    if _BOX not in eqn.params:
        return name
    return _REPLACED.get(type(eqn.params[_BOX]).__name__, name)


def params_of(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of an equation, or of the object that it calls."""
    return eqn.params[_BOX].params if _BOX in eqn.params else eqn.params


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than to return results; `Scan3` does not say it."""
    references = map(is_reference, variables(eqn.invars))
    return bool(eqn.effects) or (_BOX in eqn.params and any(references))


# An object of hijax contains the result of `jax.jit(f).trace`.
_TRACED = jax.stages.Traced
NESTING = tuple, list, Jaxpr, ClosedJaxpr, _TRACED


def subjaxprs(eqn: JaxprEqn) -> list[Program]:
    """Returns all jaxprs among the parameters of an equation."""
    found: list[Program] = []
    values = [*params_of(eqn).values()]
    for value in values:  # it grows
        if not isinstance(value, NESTING):
            continue
        if isinstance(value, (tuple, list)):
            values += value
        else:
            found.append(value.jaxpr if isinstance(value, _TRACED) else value)
    return found


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


class Body(NamedTuple):
    """A nested program that an equation runs."""

    program: Program
    places: Sequence[int]  # for each input, the position of the equation's operand


def bodies(eqn: JaxprEqn) -> list[Body]:
    """Returns the programs that an equation runs, of which a `cond` runs one.

    The list is empty if there is none, or if it is not known what its inputs are.
    """
    if loop := loop_of(eqn):
        return [Body(loop.body, range(loop.offset, len(eqn.invars)))]
    programs, name = subjaxprs(eqn), name_of(eqn)
    places = range(1 if name == "cond" else 0, len(eqn.invars))
    is_one = len(programs) == 1 and name not in ("scan", "while")
    known = all(fits(each, len(places), len(eqn.outvars)) for each in programs)
    is_read = known and (is_one or name == "cond")
    return [Body(each, places) for each in programs] if is_read else []


def name_of_call(eqn: JaxprEqn) -> str:
    """Returns the name of the function that an equation calls, "" if unknown."""
    (inner, *_) = map(bare, subjaxprs(eqn))
    return params_of(eqn).get("name") or getattr(inner.debug_info, "func_name", "")


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
        return bare(self.body).invars[self.consts : self.consts + self.carry]


def loop_of(eqn: JaxprEqn) -> Loop | None:
    """Returns the layout of a scan or while; None for other or opaque equations."""
    params, name = eqn.params, name_of(eqn)
    if name == "while":
        consts, offset = params["body_nconsts"], params["cond_nconsts"]
        return Loop(params["body_jaxpr"], consts, len(eqn.outvars), offset, None)
    bodies = subjaxprs(eqn) if name == "scan" else []
    if len(bodies) != 1 or not fits(bodies[0], len(eqn.invars), len(eqn.outvars)):
        return None
    inner = bare(bodies[0])
    # Scanned operands and stacked results have one more axis outside than inside.
    sides = (eqn.invars, inner.invars), (eqn.outvars, inner.outvars)
    same_in, same_out = (
        [shape(a) == shape(b) for a, b in zip(*side, strict=True)] for side in sides
    )
    held, carry = sum(same_in), sum(same_out)
    # The order is consts, carries, scanned. Any other layout is not known here.
    if not (all(same_in[:held]) and all(same_out[:carry]) and carry <= held):
        return None
    return Loop(bodies[0], held - carry, carry, offset=0, trips=params["length"])


def repeats(eqn: JaxprEqn) -> int:
    """Returns on how many devices, or how often in a scan, nested jaxprs run; or 1."""
    if name_of(eqn) == "shard_map":
        return eqn.params["mesh"].size
    loop = loop_of(eqn)
    return (loop and loop.trips) or 1


class CustomRule(NamedTuple):
    """The rule of a custom_jvp call: (primals, tangents) to results and tangents."""

    jaxpr: ClosedJaxpr
    zeros: Sequence[bool]  # the results without a tangent, which the jaxpr leaves out


def jvp_rule(eqn: JaxprEqn) -> CustomRule | None:
    """Returns the rule of a custom_jvp call; None if it cannot be read."""
    with contextlib.suppress(Exception):
        if _BOX in eqn.params:
            rule = _boxed_rule(eqn.params[_BOX])
            return CustomRule(rule, [False] * len(eqn.outvars))
        # JAX asks of each tangent whether it is zero; the rule is traced for no zeros.
        primals = len(eqn.invars) - eqn.params["num_consts"]
        traced = eqn.params["jvp_jaxpr_fun"].call_wrapped
        jaxpr, consts, zeros = traced(*[False] * primals)
        return CustomRule(ClosedJaxpr(bare(jaxpr), consts), zeros)
    return None


def _boxed_rule(box: Any) -> ClosedJaxpr:
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in box.in_avals_flat]

    def rule(*arrays: jax.Array) -> list[jax.Array]:
        sides = arrays[: len(types)], arrays[len(types) :]
        found = box.jvp(*(jax.tree.unflatten(box.in_tree, side) for side in sides))
        primals, tangents = map(box.out_tree.flatten_up_to, found)
        return [*primals, *map(ad.instantiate_zeros, tangents)]

    return jax.make_jaxpr(rule)(*types, *types)


class Frame(NamedTuple):
    """A line that ran while an equation was traced."""

    file: str
    function: str  # with the names of the classes and functions around it
    line: int


def frames_of(eqn: JaxprEqn) -> Iterator[Frame]:
    """Yields the frames in which an equation was traced, the innermost first."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        found = Frame(frame.file_name, frame.function_name, frame.line_num)
        # jax 0.8 keeps the frames outside of a nested trace; newer releases cut them.
        name = found.function.rpartition(".")[2]
        if name.startswith("trace_to_jaxpr") and "/jax/" in found.file:
            return
        yield found


# Files that the user did not write.
_INSTALLED = re.compile(r"/lib/python3|-packages\b")


def place_of(eqns: Iterable[JaxprEqn]) -> str:
    """Returns " (file:line, function)" of the first line of a user, "" for none."""
    for eqn in eqns:
        for frame in frames_of(eqn):
            if not _INSTALLED.search(frame.file):
                return f" ({frame.file}:{frame.line}, {frame.function})"
    return ""


def evaluate(eqn: JaxprEqn, values: Sequence[PyTree], **params: Any) -> list[jax.Array]:
    """Evaluates an equation with these operands; `params` replace its own.

    It follows `jax.core.eval_jaxpr`, which would need a jaxpr for each equation.
    """
    bound = eqn.primitive.get_bind_params({**eqn.params, **params})
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)  # jax 0.8
    where = eqn.source_info
    name_stack = source_info_util.current_name_stack() + where.name_stack
    context = source_info_util.user_context(where.traceback, name_stack=name_stack)
    with context, eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **bound)
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate_all(
    jaxpr: Jaxpr,
    inputs: Sequence[PyTree],
    consts: Sequence[PyTree] = (),
    change: Callable[[Var, jax.Array], jax.Array] = lambda var, value: value,
) -> list[jax.Array]:
    """Evaluates a bare jaxpr equation by equation, and returns its outputs.

    `change` maps a variable and its computed value to the value to use.
    """
    arguments = [*consts, *inputs]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))
    for eqn in jaxpr.eqns:
        results = evaluate(eqn, [value_of(atom, values) for atom in eqn.invars])
        for var, value in zip(eqn.outvars, results, strict=True):
            values[var] = change(var, value)
    return results_of(jaxpr, values)


def results_of(jaxpr: Jaxpr, values: Mapping[Var, jax.Array]) -> list[jax.Array]:
    """Returns the outputs of a jaxpr from the values of its variables."""
    return [
        jnp.asarray(v.val) if isinstance(v, Literal) else values[v]
        for v in jaxpr.outvars
    ]


def value_of(atom: Atom, values: Mapping[Var, jax.Array]) -> jax.Array:
    """Returns the value of a literal or of a variable."""
    return atom.val if isinstance(atom, Literal) else values[atom]


def scope(name_stack: NameStack) -> AbstractContextManager[None]:
    """Returns a context that adds these name scopes to operations."""
    current = source_info_util.current_name_stack()
    return source_info_util.set_name_stack(current + name_stack)


def with_scopes(eqn: JaxprEqn, name_stack: NameStack) -> JaxprEqn:
    """Replaces the name scopes of an equation."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=name_stack))


def map_equations(fun: Callable[[JaxprEqn], JaxprEqn], jaxpr: Program) -> Program:
    """Applies `fun` to each equation of a jaxpr, but not to nested jaxprs."""
    inner = bare(jaxpr)
    changed = inner.replace(eqns=[*map(fun, inner.eqns)])
    return changed if inner is jaxpr else jaxpr.replace(jaxpr=changed)


def map_jaxprs(fun: Callable[[Program], Program], eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of an equation, with `fun` applied to nested jaxprs."""

    def change(value: object) -> object:
        return fun(value) if isinstance(value, (Jaxpr, ClosedJaxpr)) else value

    def is_leaf(value: object) -> bool:
        return not isinstance(value, (tuple, list))

    items = eqn.params.items()
    return {k: jax.tree.map(change, v, is_leaf=is_leaf) for k, v in items}
