"""Checks whether a train step is wired right, by calling it before it trains."""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import jax

from ..._tree import is_data, is_module
from ..._types import Function, PyTree
from ..._validation import require_callable
from .._tables import printed, with_progress
from .step_calls import Check
from .step_passes import PASSES
from .step_rules import RULES, Level


@printed
class Problem(NamedTuple):
    """A finding of `check_step`.

    Attributes:
      rule: the name of the rule, such as "unscaled twice".
      where: the leaf or result, as `args[1].inner_state[0].mu['w']`, or "".
      text: the fault and its effect.
      cure: the code to write.
      level: "error", "warning" or "note"; the subject of a note may be right.
    """

    rule: str
    where: str
    text: str
    cure: str
    level: Level

    def summary(self) -> str:
        """Returns level, rule, place and text, and the cure on a line of its own."""
        where = f"{self.where}: " if self.where else ""
        return f"{self.level} [{self.rule}] {where}{self.text}\n  {self.cure}"


@printed
class StepCheck(NamedTuple):
    """The result of `check_step`, in Python values. `str()` is its summary.

    Attributes:
      problems: findings, the most severe first.
      not_checked: the questions that the calls could not answer.
      calls: the number of calls of the step.
    """

    problems: tuple[Problem, ...]
    not_checked: tuple[str, ...]
    calls: int

    @property
    def ok(self) -> bool:
        """Whether nothing but notes was found, in a step that could be checked."""
        return all(problem.level == "note" for problem in self.problems)

    def summary(self) -> str:
        """Returns every problem with its cure, and what was not checked."""
        count = sum(problem.level != "note" for problem in self.problems)
        found = f"{count} problem{'s' * (count != 1)}" if count else "no problem"
        lines = [f"check_step: {found} found in {self.calls} calls of the step."]
        lines += map(str, self.problems)
        lines += [f"not checked: {what}." for what in self.not_checked]
        return "\n".join(lines)


def check_step(
    step: Function, /, *args: PyTree, carried: Sequence[int] = (), **kwargs: PyTree
) -> StepCheck:
    """Finds out whether a train step is wired right, by calling it (host).

    Use it before a run, and first of all when a model does not learn. It finds
    gradients that are never unscaled, unscaled twice, clipped while scaled or not
    averaged over devices; a loss that is not scaled, or of captured parameters; a
    hidden overflow; an average that a skipped step changes. All of these are silent.

    ```
    ten S, 2^-17 to 2^13      nothing may grow or fall with S
    S that grows              the step is the same as one in which S stays
    the S that overflows      from it on, and not before it, steps are skipped
    S = inf                   its own optimizer is skipped, and each leaf stays
    a spike, with a guard     each leaf stays
    a NaN in the batch        no leaf stays NaN
    ```

    The step is called some 15 to 30 times with copies of the arguments, which it may
    donate. Several copies of the state are alive at a time, so check a small
    configuration of a large model. It compiles once, because S is an array; here a
    `DynamicLossScale` takes the place of a `StaticLossScale` and of a loss scale of
    your own. Prints, logs and counters outside of the step run in each call.

    State is a part that an argument and a result have in common (names and shapes), and
    the arrays in NNX modules. It cannot find: gradients that are summed in place of
    averaged, or that devices do not average where an optimizer has no moments; an S
    that is a bare number; a scaled `value=` that neither a guard nor the optimizer
    reads; averages that NaN enters where the batch has integers alone;
    and any code that these arguments do not reach.

    Args:
      step: the train step, compiled or not, with any arguments and results.
      *args: its arguments: state, batch and keys as in the first step.
      carried: positions of arguments that are bare arrays and come back at the same
        position of the results; (0,) for a step that returns one array.
      **kwargs: its keyword arguments.

    Raises:
      TypeError: `step` is not a function, or `carried` not a sequence.
      ValueError: a position in `carried` is not that of a bare array that comes back.
      Exception: any exception of the first call. Of later calls those that are not
        arithmetic, assertion, memory, run-time or value errors, or the end of an
        iterator; these are counted, and the first one is named.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jmp_scale import diagnostics
      >>> found = diagnostics.check_step(lambda w, x: w, {"w": jnp.ones(2)}, 1.0)
      >>> found.ok, found.problems[0].rule
      (False, 'nothing learned')
    """
    call = "check_step(train_step, params, opt_state, batch)"
    require_callable("check_step", step, f"write {call}")
    if not isinstance(carried, Sequence):
        raise TypeError(
            "check_step: expected a sequence of positions as carried, got "
            f"{carried!r}; write carried=({carried!r},)"
        )
    check = Check(step, args, kwargs, carried)
    if not (check.scales or check.states):
        check.add("no loss scale")
        check.not_checked.append("how the step scales: no argument is a loss scale")
    holder = _holder(step, (args, kwargs), check.has_optimizer)
    if holder is not None:
        check.add("state out of reach", what=f"A {type(holder).__name__}")
        return StepCheck(_problems(check), ("anything",), 0)
    for run_pass in with_progress(PASSES, "check_step"):
        run_pass(check)
        if check.is_over:
            break
    if check.raised:
        count, calls = str(len(check.raised)), str(check.count)
        check.add("raised", count=count, calls=calls, first=check.raised[0])
    return StepCheck(_problems(check), tuple(check.not_checked), check.count)


def _problems(check: Check) -> tuple[Problem, ...]:
    """Returns one problem for each rule, with its first place."""
    problems = []
    for name, rule in RULES.items():
        if name in check.found:
            text, places = check.found[name]
            first, *others = dict.fromkeys(places)
            where = f"{first} (and {len(others)} more)" if others else first
            problems.append(Problem(name, where, text, rule.cure, rule.level))
    return tuple(problems)


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
