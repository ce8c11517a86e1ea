"""Checks whether a train step is wired right, by calling it before it trains."""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import jax

from ..._tree import is_data, is_module
from ..._types import Function, PyTree
from ..._validation import require_callable
from .._backward import meets_nonfinite
from .._findings import Finding, are_notes, summary_of
from .._tables import printed, with_progress
from .step_base import base_of
from .step_calls import Calls
from .step_passes import OVER, PASSES, Findings
from .step_rules import RULES


@printed
class StepCheck(NamedTuple):
    """The result of `check_step`, in Python values. `str()` is its summary.

    Attributes:
      findings: what is wrong, the most severe first.
      not_checked: the questions that the calls could not answer.
      calls: the number of calls of the step.
    """

    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    calls: int

    @property
    def ok(self) -> bool:
        """Whether nothing but notes was found, in a step that could be checked."""
        return are_notes(self.findings)

    def summary(self) -> str:
        """Returns every finding with its cure, and what was not checked."""
        fine = f"check_step: no problem found in {self.calls} calls of the step."
        left = [f"not checked: {what}." for what in self.not_checked]
        return summary_of(fine, self.findings, *left)


@meets_nonfinite
def check_step(
    step: Function, /, *args: PyTree, carried: Sequence[int] = (), **kwargs: PyTree
) -> StepCheck:
    """Finds out whether a train step is wired right, by calling it (host).

    Use it before a run, and first of all when a model does not learn. The mistakes
    that it finds are silent: gradients that are never unscaled, unscaled twice, clipped
    while scaled or not averaged over devices, a hidden overflow, and others.

    ```
    ten S, 2^-37 to 2^53      in float32, no S changes a bit of the state
    S that grows              the step is the same as one in which S stays
    infinite gradients        the step is skipped, on all devices
    S = inf                   its own optimizer is skipped, and each leaf stays
    a spike, with a guard     each leaf stays
    a NaN in the batch        the next step is applied, and no leaf stays NaN
    ```

    The step is called some 20 times with copies of the arguments, which it may donate;
    several copies of the state are alive at a time. It compiles twice: as it is, and
    with `autocast` in float32, where nothing under- or overflows. Casts by hand to
    float16 stay: there nine S below the one that overflows are compared, in some 10
    calls more, and less is found. Where values differ and tell no cause, there are nine
    S more, and of several loss scales each has its own. A `DynamicLossScale` takes the
    place of a loss scale of another class. In a job of several processes each one calls
    `check_step`.

    State is a part that an argument and a result have in common (names and shapes), a
    tuple of arrays that comes back beside what it stands beside, and the arrays in NNX
    modules. It cannot find gradients that are summed in place of averaged, or that
    devices do not average where an optimizer has no moments; an S that is a bare
    number; a scaled `value=` that nothing reads; averages that NaN enters where the
    batch has integers alone; and code that these arguments do not reach.

    Args:
      step: the train step, compiled or not, with any arguments and results.
      *args: its arguments: state, batch and keys as in the first step.
      carried: positions of arguments that come back among the results, as bare arrays
        or other trees without names; (0,) for a step that returns one array.
      **kwargs: its keyword arguments.

    Raises:
      TypeError: `step` is not a function, or `carried` not a sequence.
      ValueError: a position in `carried` is not that of an argument that comes back.
      Exception: any exception of the first call. Of later calls those that are not
        arithmetic, assertion, memory, run-time or value errors, or the end of an
        iterator; these are counted, and the first one is named.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jmp_scale import diagnostics
      >>> found = diagnostics.check_step(lambda w, x: w, {"w": jnp.ones(2)}, 1.0)
      >>> found.ok, found.findings[0].rule
      (False, 'nothing learned')
    """
    call = "check_step(train_step, params, opt_state, batch)"
    require_callable("check_step", step, f"write {call}")
    if not isinstance(carried, Sequence):
        raise TypeError(
            "check_step: expected a sequence of positions as carried, got "
            f"{carried!r}; write carried=({carried!r},)"
        )
    calls = Calls(step, args, kwargs, carried)
    told = [*_told(calls, _holder(step, (args, kwargs), calls.has_optimizer))]
    if calls.raised:
        count, first = len(calls.raised), calls.raised[0]
        told += calls.found("raised", count=count, calls=calls.count, first=first)
    unchecked = tuple(each for each in told if isinstance(each, str))
    found = [each for each in told if isinstance(each, Finding)]
    return StepCheck(_one_of_each_rule(found), unchecked, calls.count)


def _told(calls: Calls, holder: object) -> Findings:
    """Yields what all passes find, up to one after which none can compare."""
    if not (calls.scales or calls.states):
        yield from calls.found("no loss scale")
        yield "how the step scales: no argument is a loss scale"
    if holder is not None:
        yield from calls.found("state out of reach", what=f"A {type(holder).__name__}")
        yield "anything"
        return
    base = base_of(calls)
    for run_pass in with_progress(PASSES, "check_step"):
        for each in run_pass(base):
            if each == OVER:
                return
            yield each


def _one_of_each_rule(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns one finding for each rule, with its first place, in the table's order."""
    firsts = {f.rule: f for f in reversed(found)}
    shown = []
    for rule in filter(firsts.get, RULES):
        places = dict.fromkeys(f.where for f in found if f.rule == rule and f.where)
        where, *others = places or [""]
        where += f" (and {len(others)} more)" if others else ""
        shown.append(firsts[rule]._replace(where=where))
    return tuple(shown)


def _holder(step: Function, args: PyTree, has_optimizer: bool) -> object:
    """Returns an object that holds a module, or arrays that may be the state."""
    step = inspect.unwrap(getattr(step, "func", step))
    owner = getattr(step, "__self__", step)
    for leaf in jax.tree.leaves((owner, args), is_leaf=is_module):
        if not (is_data(leaf) or is_module(leaf) or inspect.isclass(leaf)):
            held = jax.tree.leaves(getattr(leaf, "__dict__", {}), is_leaf=is_module)
            arrays = not has_optimizer and any(isinstance(x, jax.Array) for x in held)
            if arrays or any(map(is_module, held)):
                return leaf
    return None
