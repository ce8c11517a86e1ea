"""Traces the derivative rules of custom_jvp and custom_vjp functions on their own.

In a differentiated program JAX gives the operations of such a rule the line of the
call. Traced apart from the program they have their own lines. The names of the
parameters read here are internals of JAX, the same from 0.8 to 0.12; where they change,
there are no rules to read, and the line of the call remains.
"""

import contextlib
from typing import Any, NamedTuple

import jax

from ..._jaxpr import open_jaxpr
from .source import begin_user_code


class Traced(NamedTuple):
    """A jaxpr with its constants, laid out as JAX's closed jaxprs are."""

    jaxpr: Any
    consts: list[Any]


class VjpRules(NamedTuple):
    """The rules of a custom_vjp function.

    Attributes:
      forward: the traced forward rule; it returns (new residuals, outputs).
      backward: the traced backward rule, of (residuals, cotangents); None if it could
        not be traced.
      residuals: where each residual comes from: position i of the forward rule's
        outputs, or -1 - i for its i-th input.
    """

    forward: Traced
    backward: Any
    residuals: tuple[int, ...]


def jvp_rule(eqn: Any) -> Traced | None:
    """The rule of a custom_jvp call, of (primals, tangents); None if unreadable."""
    with contextlib.suppress(Exception):
        # JAX asks of each tangent whether it is zero: the rule is traced for none.
        primals = len(eqn.invars) - eqn.params["num_consts"]
        return _traced(eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * primals))
    return None


def vjp_rules(eqn: Any) -> VjpRules | None:
    """The rules of a custom_vjp call; None if they are unreadable."""
    with contextlib.suppress(Exception):
        inputs = list(eqn.invars)[eqn.params["num_consts"] :]
        thunk = eqn.params["fwd_jaxpr_thunk"]
        forward = _traced(thunk.call_wrapped(*[True] * len(inputs)))
        residuals = _residuals(eqn, forward)
        types = [
            (forward.jaxpr.outvars[i] if i >= 0 else inputs[-1 - i]).aval
            for i in residuals
        ]
        backward = _traced_backward(eqn, [*types, *(v.aval for v in eqn.outvars)])
        return VjpRules(forward, backward, residuals)
    return None


def _traced(result: Any) -> Traced:
    jaxpr, consts = result[:2]
    return Traced(open_jaxpr(jaxpr)[0], list(consts))


def _residuals(eqn: Any, forward: Traced) -> tuple[int, ...]:
    # A residual that is an input of the function is not an output of its forward rule.
    _, tree, forwarded = eqn.params["out_trees"]()
    new = iter(range(len(forward.jaxpr.outvars) - len(eqn.outvars)))
    return tuple(
        next(new) if forwarded[i] is None else -1 - forwarded[i]
        for i in range(tree.num_leaves)
    )


def _traced_backward(eqn: Any, types: list[Any]) -> Any:
    rule = eqn.params["bwd"]

    def run(*args: Any) -> tuple[()]:
        begin_user_code(getattr(rule, "call_wrapped", rule), *args)
        return ()

    with contextlib.suppress(Exception):
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
        return jax.make_jaxpr(run)(*structs)
    return None
