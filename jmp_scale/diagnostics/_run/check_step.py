"""Checks whether a train step is wired right, by calling it before it trains."""

import functools
import inspect
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from ..._state import LossScaleState, find_loss_scale_states
from ..._tree import find_nodes, is_data, is_module
from ..._types import Function, PyTree
from .._tables import printed, with_progress
from .step_applied import applied_step, next_step
from .step_calls import Check
from .step_rules import OF_WRAPPERS, OUTERMOST, RULES, Level
from .step_scaling import growing_s, larger_s, several_s
from .step_skips import infinite_s, nan_in_batch, spike

# Later passes read the findings of earlier ones.
_PASSES = (
    applied_step,
    several_s,
    larger_s,
    growing_s,
    next_step,
    infinite_s,
    spike,
    nan_in_batch,
)
_LEVELS = ("error", "warning", "note")


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
    step: Function, *args: PyTree, carried: Sequence[int] = (), **kwargs: PyTree
) -> StepCheck:
    """Finds out whether a train step is wired right, by calling it (host).

    Use it before a run, and first of all when a model does not learn. It finds
    gradients that are never unscaled, unscaled twice or clipped while scaled; a loss of
    another S or of captured parameters; a hidden overflow; an average that a skipped
    step changes. All of these are silent.

    ```
    eleven S, 2^-17 to 2^11   nothing may grow or fall with S
    S upward                  applied steps agree, until a step is skipped
    S that grows              the step is the same as one in which S stays
    S = inf                   its own optimizer is skipped, and each leaf stays
    a spike, a NaN            the step is skipped as a whole, on all devices
    ```

    The step is called some 30 times with copies of the arguments, which it may donate.
    Several copies of the state are alive at a time, so check a small configuration of a
    large model. It does not compile more often than in a run, because S is an array;
    only each S of a `StaticLossScale` is a compilation, so three of these are tried.
    Prints, logs and counters outside of the step run in each call.

    State is a part that an argument and a result have in common (names and shapes), and
    the arrays in NNX modules. It cannot find: gradients that are summed in place of
    averaged, averages of another optimizer's parameters, a skip that not all mesh axes
    agree on, and any code that these arguments do not reach.

    Args:
      step: the train step, compiled or not, with any arguments and results.
      *args: its arguments: state, batch and keys as in the first step.
      carried: positions of arguments that are bare arrays and come back at the same
        position of the results; (0,) for a step that returns one array.
      **kwargs: its keyword arguments.

    Raises:
      TypeError: `step` is not a function, or `carried` is not a sequence.
      ValueError: a position in `carried` is not that of a bare array that comes back.
      Exception: any exception of the first call. Of later calls those that are not
        arithmetic, assertion, memory, run-time or value errors, or the end of an
        iterator; these are counted, and the first one is named.

    Examples:
      >>> import jax, jax.numpy as jnp, jmp_scale, optax
      >>> from jmp_scale import diagnostics
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.1), jmp_scale.DynamicLossScale())
      >>> @jax.jit
      ... def step(w, state, x):
      ...     loss_fn = lambda w: jnp.mean((x @ w["w"] - 1) ** 2)
      ...     loss, grads = jax.value_and_grad(loss_fn)(w)  # never scaled
      ...     updates, state = tx.update(grads, state, w, value=loss)
      ...     return optax.apply_updates(w, updates), state, loss
      >>> w = {"w": jnp.zeros((4, 2))}
      >>> found = diagnostics.check_step(step, w, tx.init(w), jnp.ones((8, 4)))
      >>> found.ok, found.problems[0].rule
      (False, 'S not used')
    """
    if not callable(step):
        raise TypeError(
            f"check_step: expected a function as step, got a {type(step).__name__}; "
            "write check_step(train_step, params, opt_state, batch)"
        )
    if not isinstance(carried, Sequence):
        raise TypeError(
            "check_step: expected a sequence of positions as carried, got "
            f"{carried!r}; write carried=({carried!r},)"
        )
    check = Check(step, args, kwargs, carried)
    for position in carried:
        if (str(position),) not in check.arrays:
            raise ValueError(
                "check_step: expected carried= to have positions of arguments that are "
                f"bare arrays, got {position}; leave out trees of arrays"
            )
    # A list, because a tuple of states looks like a chain.
    has_optimizer = _of_arguments(check, [*args, *kwargs.values()])
    holder = _holder(step, (args, kwargs))
    held = _arrays_of(holder)
    if held and (not has_optimizer or any(map(is_module, held))):
        what, effect = f"A {type(holder).__name__}", "the step was not called"
        check.add("state out of reach", what=what, effect=effect)
        return StepCheck(_problems(check), ("anything",), 0)
    for run_pass in with_progress(_PASSES, "check_step"):
        run_pass(check)
        if check.is_over:
            break
    if any(old is not new for old, new in zip(held, _arrays_of(holder), strict=False)):
        what, effect = f"A {type(holder).__name__}", "each call changed it"
        check.add("state out of reach", what=what, effect=effect)
    if check.raised:
        count, calls = str(len(check.raised)), str(check.count)
        check.add("raised", count=count, calls=calls, first=check.raised[0])
    not_checked = tuple(dict.fromkeys(check.not_checked))
    return StepCheck(_problems(check), not_checked, check.count)


def _problems(check: Check) -> tuple[Problem, ...]:
    """Returns one problem for each rule and level, with its first place."""
    problems = []
    for (name, level), (text, places) in check.found.items():
        first, *others = dict.fromkeys(places)
        where = f"{first} (and {len(others)} more)" if others else first
        cure = RULES[name].cure
        if name in OF_WRAPPERS and check.wrapper:
            cure = OUTERMOST.get(check.wrapper, RULES["not outermost"].cure)
        problems.append(Problem(name, where, text, cure, level))
    problems.sort(key=lambda p: (_LEVELS.index(p.level), [*RULES].index(p.rule)))
    errors = {p.rule for p in problems if p.level != "note"}
    # A rule that is certainly broken needs no note about other places.
    return tuple(p for p in problems if p.level != "note" or p.rule not in errors)


def _of_arguments(check: Check, args: PyTree) -> bool:
    """Finds what the arguments show before the first call.

    Returns whether an optimizer's state, or a loss scale, is among them.
    """
    if not (check.scales or check.states or check.fixed):
        check.add("no loss scale")
    nodes = find_nodes(_is_of_optimizer, args)
    for _, node in nodes:
        if isinstance(node, LossScaleState):
            continue
        if find_loss_scale_states(node):
            is_chain = type(node) is tuple
            check.wrapper = "optax.chain" if is_chain else type(node).__name__
            check.add("not outermost", what=check.wrapper)
        else:
            check.has_other_optimizers = bool(check.states)
    return bool(nodes or check.scales or check.states or check.fixed)


def _is_of_optimizer(node: PyTree) -> bool:
    """Whether it is the state of an optimizer, or of a chain around a loss scale."""
    if type(node) is tuple:
        has_s = any(isinstance(part, LossScaleState) for part in node)
        return has_s and any(map(_is_optax, node))
    return isinstance(node, LossScaleState) or _is_optax(node)


def _is_optax(node: PyTree) -> bool:
    """Whether it is the state of one of Optax's transformations."""
    is_state = hasattr(node, "_fields") and type(node).__name__ != "LookaheadParams"
    return is_state and type(node).__module__.startswith("optax")


def _holder(step: Function, args: PyTree) -> object:
    """Returns an object that holds arrays, which may be state, or None."""
    while isinstance(step, functools.partial) or hasattr(step, "__wrapped__"):
        args = args, getattr(step, "args", ()), getattr(step, "keywords", ())
        step = getattr(step, "func", None) or inspect.unwrap(step)
    owner = getattr(step, "__self__", step)
    for leaf in jax.tree.leaves((owner, args), is_leaf=is_module):
        if is_data(leaf) or is_module(leaf) or inspect.isclass(leaf):
            continue
        if _arrays_of(leaf):
            return leaf
    return None


def _arrays_of(holder: object) -> list[PyTree]:
    """Returns the arrays and modules that an object has as attributes."""
    held = jax.tree.leaves(getattr(holder, "__dict__", {}), is_leaf=is_module)
    arrays = (jax.Array, np.ndarray)
    return [x for x in held if is_module(x) or isinstance(x, arrays)]
