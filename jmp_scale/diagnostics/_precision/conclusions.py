"""The rules of `precision_report` for a whole program, and the order of findings."""

from collections.abc import Hashable, Iterator

import jax

from ..._autocast.products import is_partly_half
from ..._jaxpr import PRODUCTS, shape
from ..._policy import is_half
from ..._types import Function, PyTree
from .._source import Place, place_of_function
from .step import SEVERITIES, Finding, Step, finding_at
from .walk import Walk
from .work import SourceLine


def half_parameters(
    gradients: PyTree, fun: Function, caller: Place
) -> Iterator[Finding]:
    """Finds parameters in half precision, by the dtypes of their gradients."""
    pairs = jax.tree.leaves_with_path(gradients)
    halves = [(path, leaf) for path, leaf in pairs if is_half(str(leaf.dtype))]
    if not halves:
        return
    path, dtype = jax.tree_util.keystr(halves[0][0]), str(halves[0][1].dtype)
    count = f"{len(halves)} arrays" if halves[1:] else "an array"
    first = f", {path}" if path else ""
    message = (
        f"the parameters are {dtype} ({count}{first}), so that small updates round to "
        "nothing; keep float32 parameters and cast them inside the loss, wrap the "
        "optimizer in with_half_parameters (and pass its opt_state), or, if they are "
        "frozen, differentiate the trained ones alone (argnums; in NNX "
        "transform=optimizer.value_and_grad)"
    )
    place = place_of_function(fun, caller)
    yield finding_at(place, "half-parameters", "error", message, dtype)


def half_loss(
    forward: Walk, loss: PyTree, fun: Function, caller: Place
) -> Iterator[Finding]:
    """Finds a loss in half precision."""
    dtype = str(getattr(loss, "dtype", ""))  # Python numbers have no dtype
    if not is_half(dtype):
        return
    keeps = "cannot exceed 65,504" if dtype == "float16" else "keeps two digits"
    message = (
        f"the loss leaves the function in {dtype}, where it {keeps}; cast to float32 "
        "before the last mean"
    )
    step = forward.outs[0].maker
    place = place_of_function(fun, caller, None if step is None else step.eqn)
    name = "" if step is None else step.name
    finding = finding_at(place, "half-loss", "warning", message, dtype, name)
    if step is not None:
        # The cast of the loss itself is reported once, by this rule.
        cast = *step.line, step.name
        forward.found = [
            f
            for f in forward.found
            if (f.file, f.line, f.primitive) != cast
            or f.rule not in ("half-sum", "half-square")
        ]
    yield finding


def overflowing_constants(forward: Walk, lines: set[SourceLine]) -> Iterator[Finding]:
    """Finds constants that were already infinite when they entered the trace."""
    # The trace says where such a constant is used, if at all, not where it is created.
    for dtype in forward.infinite:
        message = (
            f"a constant becomes infinite in {dtype}; use jnp.finfo({dtype}).min or "
            ".max, or compute this in float32"
        )
        for line in lines - {(None, None)}:
            yield finding_at(Place(*line), "half-constant", "error", message, dtype)


def two_dtypes(forward: Walk) -> Iterator[Finding]:
    """Finds products of a line in half precision, and in float32 in a custom_vjp."""
    products = [step for step in forward.steps if step.name in PRODUCTS]
    halves = {_line_and_shapes(s): s for s in products if is_partly_half(s.eqn)}
    for step in products:
        half = halves.get(_line_and_shapes(step))
        if half is None or is_partly_half(step.eqn) or not step.in_custom_vjp:
            continue
        message = (
            f"a product runs in {half.source}, and in float32 in a custom_vjp: the two "
            "differ by its rounding; compute both in one dtype (with autocast: "
            "keep_float32, or in_half around the custom_vjp)"
        )
        yield half.finding("two-dtypes", "warning", message)


def products_of_parameters(forward: Walk) -> Iterator[Finding]:
    """Finds half-precision products of parameters alone, such as those of LoRA."""
    for step in forward.steps if forward.autocasts else ():
        of_parameters = all(fact.parameters for fact in step.ins[:2])
        if not of_parameters or not is_partly_half(step.eqn):
            continue
        overflow = ", where they can overflow" if step.source == "float16" else ""
        message = (
            f"a product of parameters alone: their gradients pass through {step.source}"
            f"{overflow}; multiply the activations by one parameter after the other, "
            "x @ a @ b for x @ (a @ b), or keep the product in float32 (keep_float32)"
        )
        yield step.finding("half-parameters", "warning", message)


def _line_and_shapes(step: Step) -> tuple[Hashable, ...]:
    return *step.line, *(shape(v) for v in step.eqn.invars[:2])


def in_order(found: list[Finding], forward: Walk) -> list[Finding]:
    """Merges findings of a line and rule, and sorts by order in the forward pass."""
    groups: dict[Hashable, list[Finding]] = {}
    for f in found:
        groups.setdefault((f.file, f.line, f.rule), []).append(f)
    merged = []
    for group in groups.values():
        worst = max(group, key=lambda f: SEVERITIES.index(f.severity))
        merged.append(worst._replace(backward=all(f.backward for f in group)))
    lines: dict[Hashable, int] = {}
    for step in forward.steps if merged else ():
        lines.setdefault(step.line, len(lines))

    def position(f: Finding) -> int:
        return lines.get((f.file, f.line), len(lines) if f.backward else -1)

    return sorted(merged, key=position)
