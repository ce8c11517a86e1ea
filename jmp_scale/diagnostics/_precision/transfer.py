"""What is known about the output of an operation, given facts about its inputs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..._jaxpr import dtype_name, shape, size
from .constants import with_guard, with_values
from .facts import (
    INF,
    Fact,
    is_half,
    is_integer,
    is_wide,
    join,
    of_dtype,
    power,
    rounded,
)


def transfer(eqn: Any, facts: Sequence[Fact]) -> list[Fact]:
    """What is known about the outputs of an equation without nested jaxprs."""
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or len(eqn.outvars) != 1:
        return [of_dtype(dtype_name(v)) for v in eqn.outvars]
    fact = with_values(eqn, facts, rule(eqn, *facts))
    return [with_guard(eqn, facts, fact)]


def _same(eqn: Any, x: Fact, *rest: Fact) -> Fact:
    return dataclasses.replace(x, narrowed="", literal=False)


def _marked(eqn: Any, x: Fact) -> Fact:
    # shard_map marks a number as varying over devices before it is used.
    return x


def _broadcast(eqn: Any, x: Fact, *sizes: Fact) -> Fact:
    # A sum that is spread over an array again is part of another computation.
    spread = size(eqn.invars[0]) != size(eqn.outvars[0])
    summed = 0 if spread else x.summed
    return dataclasses.replace(x, narrowed="", literal=False, summed=summed)


def _gather(eqn: Any, x: Fact, indices: Fact) -> Fact:
    return dataclasses.replace(x, narrowed="", literal=False, summed=0)


def _convert(eqn: Any, x: Fact) -> Fact:
    dtype = dtype_name(eqn.outvars[0])
    x = dataclasses.replace(x, narrowed="", literal=False)
    if is_integer(dtype):
        top = of_dtype(dtype)
        low, high = max(x.low, top.low), min(x.high, top.high)
        # A cast to integers cuts the fractions off: constants with one are other
        # numbers.
        values = x.values if x.integral else frozenset()
        return Fact(low, high, values, only=x.only and x.integral, integral=True)
    if not is_half(dtype):
        return x
    return dataclasses.replace(
        x,
        # The wider of the two, which holds before the rounding and after it.
        low=min(x.low, rounded(x.low, dtype)),
        high=max(x.high, rounded(x.high, dtype)),
        guard=None if x.guard is None else rounded(x.guard, dtype),
        integral=False,
        summed=0,
        squared=False,
    )


def _iota(eqn: Any) -> Fact:
    dims, out = shape(eqn.outvars[0]), of_dtype(dtype_name(eqn.outvars[0]))
    length = dims[eqn.params["dimension"]] if dims else 1
    return Fact(0.0, min(float(max(length - 1, 0)), out.high), integral=True)


def _bounds(low: float, high: float, *integral: Fact) -> Fact:
    whole = bool(integral) and all(fact.integral for fact in integral)
    if math.isnan(low) or math.isnan(high):
        return Fact(integral=whole)
    return Fact(low, high, integral=whole)


def _add(eqn: Any, x: Fact, y: Fact) -> Fact:
    return _bounds(x.low + y.low, x.high + y.high, x, y)


def _sub(eqn: Any, x: Fact, y: Fact) -> Fact:
    return _bounds(x.low - y.high, x.high - y.low, x, y)


def _mul(eqn: Any, x: Fact, y: Fact) -> Fact:
    if eqn.invars[0] is eqn.invars[1]:
        return _square(eqn, x)
    # All four: the signs of the bounds are not known.
    products = [_times(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    fact = _bounds(min(products), max(products), x, y)
    for other, factor in ((x, y), (y, x)):
        if factor.only and len(factor.values) == 1:
            return _scaled(fact, other, abs(next(iter(factor.values))))
    return fact


def _times(a: float, b: float) -> float:
    # 0 times an unknown bound, which is infinite, would be NaN.
    return 0.0 if a == 0 or b == 0 else a * b


def _div(eqn: Any, x: Fact, y: Fact) -> Fact:
    if not (y.only and len(y.values) == 1) or 0.0 in y.values:
        return Fact(low=0.0 if y.low >= 0 and x.low >= 0 else -INF)
    divisor = next(iter(y.values))
    ends = (x.low / divisor, x.high / divisor)
    return _scaled(_bounds(min(ends), max(ends)), x, 1 / abs(divisor))


def _scaled(fact: Fact, x: Fact, factor: float) -> Fact:
    # A sum that is divided by its number of entries is a mean, in range again.
    summed = int(x.summed * factor) if math.isfinite(factor) else 0
    fact = dataclasses.replace(fact, summed=summed, squared=x.squared)
    return _guarded_as(x, fact)


def _guarded_as(x: Fact, fact: Fact) -> Fact:
    return dataclasses.replace(fact, guard=x.guard, guarded_at=x.guarded_at)


def _square(eqn: Any, x: Fact) -> Fact:
    return _power(eqn, x, 2)


def _integer_pow(eqn: Any, x: Fact) -> Fact:
    return _power(eqn, x, eqn.params["y"])


def _power(eqn: Any, x: Fact, exponent: int) -> Fact:
    # 1/x and x^0 have no bounds that any rule asks for.
    if exponent < 2:
        return Fact()
    high = power(x.magnitude, exponent)
    low = 0.0 if exponent % 2 == 0 or x.low >= 0 else -high
    if low == 0 and not x.may_be_zero:
        low = power(min(abs(x.low), abs(x.high)), exponent)
    wide = is_wide(dtype_name(eqn.outvars[0]))
    return Fact(low, high, integral=x.integral, squared=wide)


def _sqrt(eqn: Any, x: Fact) -> Fact:
    fact = Fact(math.sqrt(max(x.low, 0.0)), math.sqrt(max(x.high, 0.0)))
    if x.guard is not None:
        fact = dataclasses.replace(_guarded_as(x, fact), guard=math.sqrt(x.guard))
    return fact


def _abs(eqn: Any, x: Fact) -> Fact:
    low = 0.0 if x.may_be_zero else min(abs(x.low), abs(x.high))
    return _guarded_as(x, _bounds(low, x.magnitude, x))


def _neg(eqn: Any, x: Fact) -> Fact:
    values = frozenset(-value for value in x.values)
    return dataclasses.replace(
        _same(eqn, x), low=-x.high, high=-x.low, values=values
    )  # fmt: skip


def _max(eqn: Any, x: Fact, y: Fact) -> Fact:
    return _bounds(max(x.low, y.low), max(x.high, y.high), x, y)


def _min(eqn: Any, x: Fact, y: Fact) -> Fact:
    fact = _bounds(min(x.low, y.low), min(x.high, y.high), x, y)
    return _guarded_as(x if y.guard is None else y, fact)


def _clamp(eqn: Any, low: Fact, x: Fact, high: Fact) -> Fact:
    return _min(eqn, _max(eqn, x, low), high)


def _rem(eqn: Any, x: Fact, y: Fact) -> Fact:
    whole = x.integral and y.integral
    # `positions % 512` is at most 511, so a table of 512 needs no warning.
    bound = max(y.magnitude - 1, 0.0) if whole else y.magnitude
    return _bounds(0.0 if x.low >= 0 else -bound, bound, x, y)


def _select(eqn: Any, predicate: Fact, *cases: Fact) -> Fact:
    return functools.reduce(join, cases)


def _hull(eqn: Any, *facts: Fact) -> Fact:
    return functools.reduce(join, facts)


def _update(eqn: Any, x: Fact, update: Fact, *indices: Fact) -> Fact:
    return join(x, update)


def _scatter(eqn: Any, x: Fact, indices: Fact, update: Fact) -> Fact:
    return join(x, update)


def _reduce_sum(eqn: Any, x: Fact) -> Fact:
    return _added(eqn, x, size(eqn.invars[0]) // max(size(eqn.outvars[0]), 1))


def _cumsum(eqn: Any, x: Fact) -> Fact:
    return join(_added(eqn, x, shape(eqn.invars[0])[eqn.params["axis"]]), x)


def _window_sum(eqn: Any, x: Fact) -> Fact:
    return _added(eqn, x, math.prod(eqn.params["window_dimensions"]))


def _added(eqn: Any, x: Fact, count: int) -> Fact:
    dtype = dtype_name(eqn.outvars[0])
    fact = _bounds(_times(x.low, count), _times(x.high, count))
    return dataclasses.replace(
        fact,
        integral=x.integral and is_integer(dtype),
        summed=max(x.summed, 1) * count if is_wide(dtype) else 0,
        squared=x.squared,
    )


def _index(eqn: Any, x: Fact) -> Fact:
    length = math.prod(shape(eqn.invars[0])[axis] for axis in eqn.params["axes"])
    return Fact(0.0, float(max(length - 1, 0)), integral=True)


def _truth(eqn: Any, *facts: Fact) -> Fact:
    return of_dtype(dtype_name(eqn.outvars[0]))


def _within(low: float, high: float) -> Callable[..., Fact]:
    return lambda eqn, *facts: Fact(low, high)


def _growing(fun: Callable[[float], Any]) -> Callable[..., Fact]:
    def rule(eqn: Any, x: Fact) -> Fact:
        with np.errstate(all="ignore"):
            return _bounds(float(fun(x.low)), float(fun(x.high)))

    return rule


def _rounding(fun: Callable[[float], Any]) -> Callable[..., Fact]:
    def rule(eqn: Any, x: Fact) -> Fact:
        return _bounds(float(fun(x.low)), float(fun(x.high)), Fact(integral=True))

    return rule


_UNCHANGED = (
    "reshape transpose squeeze expand_dims rev slice dynamic_slice copy copy_p tile "
    "stop_gradient reduce_max reduce_min sort cummax cummin reduce_precision real name "
    "reduce_window_max reduce_window_min optimization_barrier device_put reshard "
    "sharding_constraint all_gather ppermute pmax pmin all_to_all"
)

_RULES: dict[str, Callable[..., Fact]] = {
    **dict.fromkeys(_UNCHANGED.split(), _same),
    **dict.fromkeys(["pvary", "pcast", "pbroadcast"], _marked),
    **dict.fromkeys(["eq", "ne", "lt", "le", "gt", "ge", "is_finite"], _truth),
    **dict.fromkeys(["tanh", "sin", "cos", "erf", "sign"], _within(-1.0, 1.0)),
    **dict.fromkeys(["argmax", "argmin"], _index),
    **dict.fromkeys(["concatenate", "stack", "pad"], _hull),
    "logistic": _within(0.0, 1.0),
    "erfc": _within(0.0, 2.0),
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "iota": _iota,
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "square": _square,
    "integer_pow": _integer_pow,
    "exp": _growing(np.exp),
    "exp2": _growing(np.exp2),
    "floor": _rounding(np.floor),
    "ceil": _rounding(np.ceil),
    "round": _rounding(np.round),
    "sqrt": _sqrt,
    "abs": _abs,
    "neg": _neg,
    "max": _max,
    "min": _min,
    "clamp": _clamp,
    "rem": _rem,
    "select_n": _select,
    "dynamic_update_slice": _update,
    "scatter": _scatter,
    "gather": _gather,
    "reduce_sum": _reduce_sum,
    "cumsum": _cumsum,
    "reduce_window_sum": _window_sum,
}
