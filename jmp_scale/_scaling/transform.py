"""`with_loss_scale`: wraps an Optax optimizer, and skips steps that overflowed."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from .. import _mesh, _state
from .._policy import holds_half
from .._state import LossScale, LossScaleState
from .._tree import is_data, is_inexact, map_inexact, promote_to_float32
from .._types import Flag, KeyPath, PyTree
from .._validation import warn
from .finite import finite, finite_and_norm
from .loss_scale import NoOpLossScale, checked_loss_scale
from .skip import attempt, keep, select_step
from .spike_guard import SpikeGuard

T = TypeVar("T")
ExtraArgs = dict[str, Any]  # keyword arguments of `update` after the parameters


class LossScaleTransformation(optax.GradientTransformationExtraArgs):
    """The Optax transformation that `with_loss_scale` returns; its state is typed."""

    init: Callable[[optax.Params], LossScaleState]  # pyright: ignore
    update: Callable[..., tuple[optax.Updates, LossScaleState]]  # pyright: ignore

    def would_apply(
        self, updates: optax.Updates, value: ArrayLike | None, guard: SpikeGuard | None
    ) -> Flag:
        """Returns the decision of `update`, bool[]; XLA merges both into one."""
        steps: _SkippingOptimizer = self.update.__self__  # pyright: ignore
        return steps.judge(updates, value, guard).applied


def with_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
    *,
    axis_name: _mesh.AxisName = None,
    guard: SpikeGuard | None = None,
) -> LossScaleTransformation:
    """Wraps an Optax optimizer: skips steps that overflow, adjusts the loss scale S.

    Use it to train in float16, together with `value_and_grad`, which scales the loss by
    the S of the state. Without a loss scale it only skips steps that are not finite, so
    that a bfloat16 or float32 run survives a bad batch.

    If gradients and loss are finite, `inner` runs. Otherwise the updates are -0.0
    (adding them changes no bit of the parameters; XLA on a CPU flushes subnormals), and
    the whole state of `inner` is left unchanged. S is adjusted in both cases, without a
    branch. A step is differentiated like a branch: a skipped step is the identity.

    Make it the outermost wrapper, so that nothing hides an overflow. Clipping,
    `zero_nans`, `MultiSteps` and schedules belong inside, where they see unscaled
    finite gradients. The updates of `inner` are checked only if `grad_fn` is passed.

    Args:
      inner: any Optax optimizer or chain.
      loss_scale: initial; default `NoOpLossScale()`, a plain skip of non-finite steps.
      axis_name: mesh axes whose devices must skip together: see `all_finite`.
      guard: a `SpikeGuard` also skips steps whose loss or gradient norm is an outlier.

    Returns:
      A transformation with state `LossScaleState`, whose
      `update(updates, state, params=None, *, value=None, **extra_args)` takes unscaled
      gradients of any dtype; `inner` gets them in float32 or wider. Updates have the
      dtypes of `params`, if given; those of `with_half_storage` are float32.

      `value` is the unscaled scalar loss. If it is not finite, the step is skipped and
      S stays. `inner` gets `value` if the signature of its `update` accepts it.
      `value_fn`, `obj_fn`, `grad_fn` and `grad` must belong to the unscaled loss too.

    Raises:
      TypeError: an argument of another type; from `update`, a state that `init` did not
        return, or `loss=` without `value=` if `inner` does not name it.
      ValueError: `inner` contains another `with_loss_scale` (from `init`); from
        `update`: `value` is not a scalar, gradients and parameters differ in structure,
        gradients are `unreduced`, or `inner` changes the structure of its state.

    Warns:
      UserWarning: from `init`, half-precision parameters, which lose small updates.
    """
    inner = _state.checked_optimizer("with_loss_scale", inner)
    loss_scale = NoOpLossScale() if loss_scale is None else loss_scale
    loss_scale = checked_loss_scale("with_loss_scale", loss_scale)
    agreement = _mesh.agreement("with_loss_scale", axis_name)
    if guard is not None and not isinstance(guard, SpikeGuard):
        raise TypeError(
            f"with_loss_scale: expected guard to be a SpikeGuard, got {guard!r}; write "
            "guard=jmp_scale.SpikeGuard(threshold=6.0)"
        )
    steps = _SkippingOptimizer(inner, loss_scale, guard, agreement)
    return LossScaleTransformation(steps.init, steps.update)  # pyright: ignore


@dataclasses.dataclass(frozen=True, eq=False)
class _SkippingOptimizer:
    """The steps of `inner`, each of them applied or rejected as a whole."""

    inner: optax.GradientTransformationExtraArgs
    loss_scale: LossScale  # of the first step
    guard: SpikeGuard | None  # before the first step
    agreement: _mesh.Agreement

    def init(self, params: optax.Params) -> LossScaleState:
        """Returns the state before the first step."""
        inner_state = self.inner.init(params)
        if nested := _state.find_loss_scale_states(inner_state):
            raise ValueError(
                "with_loss_scale: expected an optimizer without a loss scale, got one "
                "that contains with_loss_scale, at inner_state"
                f"{jax.tree_util.keystr(nested[0][0])}; wrap once, outermost"
            )
        if not _state.find_half_storage(inner_state):
            _warn_of_half_precision(params)
        state = LossScaleState(
            loss_scale=self.loss_scale,
            inner_state=inner_state,
            guard=self.guard,
            **{name: jnp.asarray(value) for name, value in _state.START.items()},
        )
        return fresh_buffers(state, (params, self.loss_scale, self.guard))

    def update(
        self,
        updates: optax.Updates,
        state: LossScaleState,
        params: optax.Params | None = None,
        *misplaced: object,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaleState]:
        """Judges a step, applies or rejects it, and returns the state after it."""
        _check_arguments(updates, state, params, *misplaced)
        verdict = self.judge(updates, value, state.guard)
        applied = verdict.applied
        arrays, others = self._split(extra_args, value)
        inputs, old = (promote_to_float32(updates), arrays), state.inner_state
        run = functools.partial(self._apply, params, others)
        if "grad_fn" in others:
            # An overflow of its result shows in the updates, and counts like one of
            # the gradients.
            updates, new = attempt(applied, run, inputs, old)
            is_good = finite(updates, self.agreement) | ~applied
            applied, grads_finite = applied & is_good, verdict.grads_finite & is_good
            verdict = verdict._replace(applied=applied, grads_finite=grads_finite)
            updates, new = keep(applied, updates, new, old)
        else:
            updates, new = select_step(applied, run, inputs, old, (params, others))
        return updates, _next_state(state, verdict, new)

    def judge(
        self, updates: optax.Updates, value: ArrayLike | None, guard: SpikeGuard | None
    ) -> "_Verdict":
        """Decides, alike on all devices, whether the optimizer may apply a step."""
        if value is not None and not (is_data(value) and jnp.shape(value) == ()):
            raise ValueError(
                "with_loss_scale: expected value to be the scalar loss, got "
                f"{value!r}; pass the loss alone"
            )
        _mesh.refuse_unreduced("with_loss_scale", updates)
        agree = self.agreement
        loss_finite = jnp.array(True) if value is None else finite(value, agree)
        if guard is None:
            grads_finite, spike = finite(updates, agree), jnp.array(False)
            applied = grads_finite & loss_finite
            return _Verdict(applied, grads_finite, loss_finite, spike)
        # A decision has no derivative.
        guard, value = map_inexact(lax.stop_gradient, (guard, value))
        grads_finite, norm = finite_and_norm(updates, agree)
        is_finite = grads_finite & loss_finite
        # The guard sees the largest loss of all devices: a replica must not skip alone.
        loss = None
        if value is not None:
            loss = agree(lax.pmax, jnp.asarray(value).astype(jnp.float32))
            # A float64 loss beyond float32's range is finite, and certainly a spike.
            loss = jnp.where(loss_finite, jnp.nan_to_num(loss), jnp.nan)
        spike, guard = guard.judge(loss, norm, is_finite)
        return _Verdict(is_finite & ~spike, grads_finite, loss_finite, spike, guard)

    def _split(
        self, extra_args: ExtraArgs, value: ArrayLike | None
    ) -> tuple[ExtraArgs, ExtraArgs]:
        """Returns the extra arguments of `inner` that may be NaN, and the others."""
        arrays, others = {}, dict(extra_args)
        parameters = inspect.signature(self.inner.update).parameters
        if value is None and "loss" in others and "loss" not in parameters:
            raise TypeError(
                "with_loss_scale: expected the loss as value=, got loss=; write "
                "update(grads, state, params, value=loss), and loss=loss beside it if "
                "a part of inner takes that"
            )
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if value is not None and (takes_all or "value" in parameters):
            arrays["value"] = jnp.asarray(value)
        if "grad" in others:
            arrays["grad"] = promote_to_float32(others.pop("grad"))
        return arrays, others

    def _apply(
        self,
        params: optax.Params | None,
        others: ExtraArgs,
        inputs: tuple[optax.Updates, ExtraArgs],
        inner_state: optax.OptState,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Calls `inner`; returns updates and a state of the types that they had."""
        grads, arrays = inputs
        extra_args = others | arrays
        try:
            updates, new = self.inner.update(grads, inner_state, params, **extra_args)
        except TypeError as error:
            if "unexpected keyword argument 'value'" in str(error):
                error.add_note(
                    "with_loss_scale passes value= to inner, whose chain passes it to "
                    "all parts. Put the part that refuses it outermost in inner, as "
                    "optax.contrib.sam(optax.chain(...), ...), or leave value= out."
                )
            raise
        # A cast to half precision would round the updates of with_half_storage.
        if params is not None and not _state.find_half_storage(inner_state):
            updates = jax.tree.map(
                _cast_leaf, updates, params, is_leaf=_state.is_nothing
            )
        return updates, _state_like(new, inner_state)


class _Verdict(NamedTuple):
    """The decision on a step, what it follows from, and the guard after it."""

    applied: Flag  # both finite, and no spike
    grads_finite: Flag  # without the loss, unlike that of the state
    loss_finite: Flag
    spike: Flag
    guard: SpikeGuard | None = None


def _next_state(
    state: LossScaleState, verdict: _Verdict, inner_state: optax.OptState
) -> LossScaleState:
    """Adjusts S and counts the step."""
    applied, grads_finite, loss_finite, spike, guard = verdict
    # No S makes a spike smaller, so S treats it like a loss that is not finite.
    loss_scale = state.loss_scale.adjust(grads_finite, loss_finite=loss_finite & ~spike)
    return LossScaleState(
        loss_scale=loss_scale,
        inner_state=inner_state,
        grads_finite=grads_finite & loss_finite,
        applied=applied,
        skipped=state.skipped + jnp.int32(~applied),
        skipped_in_a_row=jnp.where(applied, 0, state.skipped_in_a_row + 1),
        nonfinite_losses=state.nonfinite_losses + jnp.int32(~loss_finite),
        spikes=state.spikes + jnp.int32(spike),
        guard=guard,
    )


def _warn_of_half_precision(params: optax.Params) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if holds_half(leaf):
            warn(
                "with_loss_scale: expected float32 parameters, got "
                f"{jax.tree_util.keystr(path) or '(the whole tree)'} of {leaf.dtype}, "
                "which loses updates smaller than its precision; keep them in float32 "
                f'(jmp_scale.get_policy("params=float32,compute={leaf.dtype}")'
                ".cast_to_param(params)) and cast them in the loss, or store the "
                "remainders: with_loss_scale(jmp_scale.with_half_storage(optimizer))"
            )
            return


def _check_arguments(
    updates: PyTree, state: object, params: PyTree, *misplaced: object
) -> None:
    """Raises an error for mistakes that would be silent or obscure."""
    if misplaced or updates is None or not isinstance(state, LossScaleState):
        given = (type(x).__name__ for x in (updates, state, params, *misplaced))
        raise TypeError(
            "with_loss_scale: expected update(grads, state, params, value=loss), got "
            f"update({', '.join(given)}); pass the LossScaleState that init returns, "
            "or that jmp_scale.checkpoints.restore makes of a plain optimizer's state"
        )
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    if params is None:
        return

    def compare(update: PyTree, param: PyTree) -> None:
        if not _state.is_nothing(update):  # "nothing" may stand for a whole subtree
            jax.tree.map(lambda *_: None, param, update, is_leaf=_state.is_nothing)

    try:
        jax.tree.map(compare, updates, params, is_leaf=_state.is_nothing)
    except ValueError as error:
        raise ValueError(
            "with_loss_scale: expected gradients of the structure of the parameters, "
            f"got\n  gradients:  {jax.tree.structure(updates)}\n"
            f"  parameters: {jax.tree.structure(params)}"
        ) from error


def fresh_buffers(state: T, params: PyTree = ()) -> T:
    """Makes arrays strongly typed, in buffers that `params` and other leaves lack."""
    # A state may hold the parameters themselves; a buffer can be donated only once.
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}

    def fresh_leaf(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, (jax.Array, bool, int, float, complex)):
            return leaf
        array = jnp.asarray(leaf)
        # The first step would make a weak type strong, and the second recompile.
        if getattr(array, "weak_type", False):  # typed keys have no such attribute
            array = jnp.asarray(array, array.dtype)
        array = jnp.copy(array) if id(array) in taken else array
        taken.add(id(array))
        return array

    return jax.tree.map(fresh_leaf, state)


def _cast_leaf(x: PyTree, like: PyTree) -> PyTree:
    """Casts a floating-point leaf to the dtype of another."""
    is_cast = is_inexact(x) and is_inexact(like)
    return jnp.asarray(x).astype(jnp.result_type(like)) if is_cast else x


def _state_like(new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """Gives a new state the dtypes and shardings of the old one."""
    treedef, old_treedef = jax.tree.structure(new), jax.tree.structure(old)
    if treedef != old_treedef:
        raise ValueError(
            "with_loss_scale: expected inner to keep the structure of its state, got\n"
            f"  from update: {treedef}\n  from init:   {old_treedef}\n"
            "Chain what only measures, such as optax.monitor, outside of it"
        )

    def like(path: KeyPath, new: PyTree, old: PyTree) -> PyTree:
        new = _cast_leaf(new, old)
        if is_data(new) and is_data(old):
            got, expected = jax.typeof(new), jax.typeof(old)
            if (got.shape, got.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    "with_loss_scale: expected inner to keep the types of its state, "
                    f"got inner_state{jax.tree_util.keystr(path)} as {got} from "
                    f"update, and as {expected} from init"
                )
        return _mesh.reshard_like(new, old)

    return jax.tree_util.tree_map_with_path(like, new, old)
