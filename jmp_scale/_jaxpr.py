"""Reads and evaluates traced programs: types, nested jaxprs and loops.

The parameters of JAX's higher-order primitives are not an interface and change between
releases, so their layout is inferred from shapes where that is possible. What cannot be
read is reported as not looked into.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util


def words(text: str) -> frozenset[str]:
    """The words of a text: a set of names that reads well in the source."""
    return frozenset(text.split())


# Matrix products and convolutions.
PRODUCTS = words("conv_general_dilated dot_general ragged_dot_general")
# Primitives of JAX that no public module lists, and Equinox's own, which mark values
# and compute nothing that could be read wrongly.
_UNLISTED = words(
    "addupdate freeze new_ref pbroadcast platform_index psum_invariant pvary "
    "ragged_dot_general random_clone random_unwrap random_wrap reduce_scatter reshard "
    "scaled_dot shard_map unreduced_psum announce_jaxpr maybe_set nonbatchable "
    "nondifferentiable_backward nontraceable select_if_vmap unvmap_all unvmap_any "
    "unvmap_max vprim"
)

_text = functools.cache(str)  # the name of a dtype takes NumPy a microsecond


class Loop(NamedTuple):
    """A scan or while: its body, and how its operands are laid out."""

    body: Any  # the jaxpr that runs in each iteration
    consts: int  # leading inputs that are the same in each iteration
    carry: int  # inputs after these, which an iteration hands to the next
    offset: int  # position of the body's first input among the equation's operands
    trips: int | None  # iterations; None if their number depends on the data

    @property
    def carries(self) -> list[Any]:
        """The variables of the body that an iteration hands to the next."""
        inner, _ = open_jaxpr(self.body)
        return inner.invars[self.consts : self.consts + self.carry]


def is_literal(atom: Any) -> bool:
    """Whether an input of an equation is a number in the program text."""
    return isinstance(atom, jax.extend.core.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """What of these is no number in the program text."""
    return [v for v in atoms if not is_literal(v)]


def shape(atom: Any) -> tuple[int, ...]:
    """Shape of a variable, () if its type has none."""
    dims = getattr(atom.aval, "shape", ())
    return tuple(d if isinstance(d, int) else 1 for d in dims)


def size(atom: Any) -> int:
    """Number of entries of a variable; 1 if its type has no shape."""
    return math.prod(shape(atom))


def dtype_name(atom: Any) -> str:
    """Name of a variable's dtype, such as "float16"; "" if its type has none."""
    return _text(getattr(atom.aval, "dtype", ""))


def is_float32(atom: Any) -> bool:
    return dtype_name(atom) == "float32"


def is_floating(atom: Any) -> bool:
    """Whether a variable or number is of a real or complex dtype, of any width."""
    return "float" in dtype_name(atom) or "complex" in dtype_name(atom)


def constant(value: Any) -> np.ndarray | None:
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


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr and the values of its constants; jax 0.12 has only one kind of jaxpr."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = list(getattr(jaxpr, "consts", ()) or ())
    # A bare jaxpr names its constants without their values: they are unknown then.
    if len(consts) != len(inner.constvars):
        consts = [None] * len(inner.constvars)
    return inner, consts


def subjaxprs(eqn: Any) -> list[Any]:
    """All jaxprs among the parameters of an equation, whatever their names."""
    values = jax.tree.leaves([*eqn.params.values()], is_leaf=_is_no_sequence)
    return [*filter(_is_jaxpr, values)]


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, including those of the jaxprs within them."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for part in subjaxprs(eqn):
            yield from equations(part)


def evaluate(eqn: Any, values: Sequence[Any], **params: Any) -> list[Any]:
    """The results of an equation for these operands, `params` in place of its own."""
    # As `jax.core.eval_jaxpr` does it, which needs a jaxpr for each equation.
    bound = eqn.primitive.get_bind_params({**eqn.params, **params})
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)  # jax 0.8
    where = eqn.source_info
    name_stack = source_info_util.current_name_stack() + where.name_stack
    context = source_info_util.user_context(where.traceback, name_stack=name_stack)
    with context, eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **bound)
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate_all(
    jaxpr: Any,
    inputs: Sequence[Any],
    consts: Sequence[Any] = (),
    change: Callable[[Any, Any], Any] = lambda var, value: value,
) -> list[jax.Array]:
    """The outputs of a bare jaxpr, evaluated equation by equation.

    `change` takes a variable and its value, and returns the value that it gets.
    """
    arguments = [*consts, *inputs]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))
    for eqn in jaxpr.eqns:
        results = evaluate(eqn, [value_of(atom, values) for atom in eqn.invars])
        for var, value in zip(eqn.outvars, results, strict=True):
            values[var] = change(var, value)
    return results_of(jaxpr, values)


def results_of(jaxpr: Any, values: Mapping[Any, Any]) -> list[Any]:
    """The outputs of a jaxpr, where its variables have these values."""
    return [jnp.asarray(v.val) if is_literal(v) else values[v] for v in jaxpr.outvars]


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """The value of a number in the program text, or of a variable."""
    return atom.val if is_literal(atom) else values[atom]


def fits(jaxpr: Any, inputs: int, outputs: int) -> bool:
    """Whether a nested jaxpr has these numbers of inputs and outputs."""
    inner, _ = open_jaxpr(jaxpr)
    return len(inner.invars) == inputs and len(inner.outvars) == outputs


def loop_of(eqn: Any) -> Loop | None:
    """The layout of a scan or while equation; None if it is another or unreadable."""
    if eqn.primitive.name == "while":
        body, consts = eqn.params["body_jaxpr"], eqn.params["body_nconsts"]
        return Loop(body, consts, len(eqn.outvars), eqn.params["cond_nconsts"], None)
    return _scan_layout(eqn) if eqn.primitive.name == "scan" else None


def jvp_rule(eqn: Any) -> Any:
    """The rule of a custom_jvp call, of (primals, tangents); None if unreadable."""
    with contextlib.suppress(Exception):
        # JAX asks of each tangent whether it is zero: the rule is traced for none.
        primals = len(eqn.invars) - eqn.params["num_consts"]
        result = eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * primals)
        return jax.extend.core.ClosedJaxpr(open_jaxpr(result[0])[0], result[1])
    return None


def mesh_size(eqn: Any) -> int:
    """How many devices run the jaxpr of a `shard_map`; 1 for other equations."""
    is_map = eqn.primitive.name == "shard_map"
    return eqn.params["mesh"].size if is_map else 1


def likeness(jaxpr: Any) -> Any:
    """What jaxprs share that are the same program, from the same source lines."""
    numbers: dict[Any, int] = {}

    def name(atom: Any) -> Any:
        if is_literal(atom):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers))

    facts: list[Any] = [(name(v), v.aval) for v in jaxpr.invars]
    for eqn in jaxpr.eqns:
        where = eqn.source_info.traceback, eqn.source_info.name_stack
        params, names = sorted(eqn.params.items()), map(name, eqn.invars + eqn.outvars)
        facts.append((eqn.primitive, eqn.ctx, where, *params, *names))
    return *facts, *map(name, jaxpr.outvars)


def without_common_scope(jaxpr: Any) -> tuple[Any, Any]:
    """The scopes in which all equations are, and the jaxpr with the others."""
    stacks = [eqn.source_info.name_stack for eqn in jaxpr.eqns]
    columns = zip(*(stack.stack for stack in stacks), strict=False)
    depth = len([*itertools.takewhile(lambda names: len({*names}) == 1, columns)])
    pairs = zip(jaxpr.eqns, stacks, strict=True)
    equations = [with_scopes(eqn, stack[depth:]) for eqn, stack in pairs]
    scope = stacks[0][:depth] if stacks else source_info_util.NameStack()
    return scope, jaxpr.replace(eqns=equations)


def with_scopes(eqn: Any, name_stack: Any) -> Any:
    """An equation in these scopes in place of its own."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=name_stack))


def with_precision(jaxpr: Any, precision: Any) -> Any:
    """A jaxpr whose products without a precision of their own have this one."""
    if precision is None:
        return jaxpr
    try:
        level = jax.lax.Precision(precision)
    except ValueError:  # it names an algorithm
        return jaxpr
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # jax 0.12 has only one kind of jaxpr
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=with_precision(inner, level))
    equations = []
    for eqn in jaxpr.eqns:
        params = map_jaxprs(functools.partial(with_precision, precision=level), eqn)
        if eqn.primitive.name in PRODUCTS and params.get("precision", 0) is None:
            params["precision"] = (level, level)
        equations.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=equations)


def map_jaxprs(fun: Callable[[Any], Any], eqn: Any) -> dict[str, Any]:
    """The parameters of an equation, with `fun` of each jaxpr among them."""

    def change(value: Any) -> Any:
        return fun(value) if _is_jaxpr(value) else value

    items = eqn.params.items()
    return {k: jax.tree.map(change, v, is_leaf=_is_no_sequence) for k, v in items}


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _is_no_sequence(value: Any) -> bool:
    return not isinstance(value, (tuple, list))


def scope(name_stack: Any) -> Any:
    """A context in which operations are in these scopes too."""
    current = source_info_util.current_name_stack()
    return source_info_util.set_name_stack(current + name_stack)


def inlined(jaxpr: Any, is_open: Callable[[Any], bool]) -> tuple[Any, dict[Any, Any]]:
    """A jaxpr with some of its calls opened, and its constants by variable."""
    constants: dict[Any, Any] = {}
    equations: list[Any] = []

    def add(body: Any, inputs: Sequence[Any], scopes: Any) -> list[Any]:
        inner, values = open_jaxpr(body)
        fresh = [jax.extend.core.Var(v.aval) for v in inner.constvars]
        constants.update(zip(fresh, values, strict=True))
        before, after = [*inner.constvars, *inner.invars], [*fresh, *inputs]
        renamed = dict(zip(before, after, strict=True))

        def named(atoms: Sequence[Any]) -> list[Any]:
            return [v if is_literal(v) else renamed[v] for v in atoms]

        for eqn in inner.eqns:
            inputs, within = named(eqn.invars), scopes + eqn.source_info.name_stack
            if is_open(eqn):
                outputs = add(subjaxprs(eqn)[0], inputs, within)
            else:
                outputs = [jax.extend.core.Var(v.aval) for v in eqn.outvars]
                renewed = eqn.replace(invars=inputs, outvars=outputs)
                equations.append(with_scopes(renewed, within))
            renamed.update(zip(eqn.outvars, outputs, strict=True))
        return named(inner.outvars)

    outer, _ = open_jaxpr(jaxpr)
    outputs = add(jaxpr, outer.invars, source_info_util.NameStack())
    return part(outer, equations, outer.invars, outputs), constants


def part(jaxpr: Any, equations: Any, inputs: Any, outputs: Any) -> Any:
    """A jaxpr of some equations of another one, with these inputs and outputs."""
    return jaxpr.replace(
        constvars=[], invars=[*inputs], outvars=[*outputs], eqns=[*equations]
    )


@functools.cache
def known_primitives() -> frozenset[str]:
    """Names of JAX's own primitives; new and foreign ones are "not looked into"."""
    # JAX has no list of its primitives.
    return _UNLISTED.union(
        primitive.name
        for module in (jax.lax, jax.extend.core.primitives)
        for primitive in vars(module).values()
        if isinstance(primitive, jax.extend.core.Primitive)
    )


def _scan_layout(eqn: Any) -> Loop | None:
    bodies = subjaxprs(eqn)
    if len(bodies) != 1 or not fits(bodies[0], len(eqn.invars), len(eqn.outvars)):
        return None
    inner, _ = open_jaxpr(bodies[0])
    # Scanned operands and stacked results have one axis more outside than inside.
    pairs = zip(eqn.invars, inner.invars, strict=True)
    same_in = [shape(a) == shape(b) for a, b in pairs]
    pairs = zip(eqn.outvars, inner.outvars, strict=True)
    same_out = [shape(a) == shape(b) for a, b in pairs]
    held, carry = sum(same_in), sum(same_out)
    # The order is consts, carries, scanned. Any other layout is not known here.
    if not (all(same_in[:held]) and all(same_out[:carry]) and carry <= held):
        return None
    return Loop(bodies[0], held - carry, carry, 0, eqn.params["length"])
