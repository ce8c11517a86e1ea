"""Any Optax optimizer, with steps that overflowed skipped as a whole."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from . import _mesh
from ._extra_args import keywords_of, takes_value
from ._finite import finite, finite_and_norm
from ._half_parameters import find_half_states, holds_half, is_nothing
from ._loss_scale import LossScale, NoOpLossScale, checked_loss_scale
from ._skip import select_step, unless
from ._spike_guard import SpikeGuard
from ._state import START, LossScaleState, find_loss_scale_states
from ._tree import is_data, is_inexact, map_inexact, promote_to_float32
from ._validation import warn


class LossScaleTransformation(optax.GradientTransformationExtraArgs):
    """What `with_loss_scale` returns: an Optax transformation whose state is typed."""

    init: Callable[[Any], LossScaleState]  # pyright: ignore
    update: Callable[..., tuple[Any, LossScaleState]]  # pyright: ignore


def with_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
    *,
    axis_name: _mesh.AxisName = None,
    guard: SpikeGuard | None = None,
) -> LossScaleTransformation:
    """Wraps an Optax optimizer: skips a step that overflowed, and adjusts S.

    When all gradients are finite, `inner` runs. When not, the updates are -0.0 (added
    to parameters they change no bit) and `inner`'s whole state stays: moments, counts,
    schedules, keys. S is adjusted in either case, without a branch.

    Make it the outermost wrapper, so that nothing hides an overflow. Clipping,
    `zero_nans`, `MultiSteps` and schedules belong inside, where they see unscaled
    finite gradients. With `MultiSteps` a skip drops one micro-batch from the window.

    Checked are the gradients, the loss, and with `grad_fn` what `inner` makes of them.
    What `inner` itself makes NaN out of finite gradients is applied, as in Optax. The
    derivatives of a step are those of a branch: a skipped step is the identity.

    Args:
      inner: any Optax optimizer or chain.
      loss_scale: initial; default `NoOpLossScale()`, a plain skip of non-finite steps.
      axis_name: mesh axes over which the skip is agreed: see `all_finite`.
      guard: a `SpikeGuard` also skips steps whose loss or gradient norm leaps.

    Returns:
      A transformation with state `LossScaleState`, whose
      `update(updates, state, params=None, *, value=None, **extra_args)` takes unscaled
      gradients of any dtype and returns updates of the dtypes of `params`, if given,
      or those of `with_half_parameters` in float32.
      `inner` sees float32 in place of narrower gradients, unless it demands the dtype
      of half-precision parameters, as `optax.novograd` does.

      `value` is the unscaled scalar loss. When it is not finite the step is skipped and
      S stays: no S changes the forward pass. `inner` gets it if its signature takes it.
      `value_fn`, `obj_fn`, `grad_fn`, `grad` must be of the unscaled loss too.

    Raises:
      TypeError: an argument of another type; from `update`, a state that `init` did not
        make, or a loss under another name than `value`.
      ValueError: `inner` contains another `with_loss_scale` (from `init`); from
        `update`, while tracing: `value` is not a scalar, gradients and parameters
        differ in structure, or `inner` changes structure, shape or dtype of its state.

    Warns:
      UserWarning: `init` of half-precision parameters, which lose small updates.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> loss_scale = jmp_scale.DynamicLossScale(2.0**15)
      >>> tx = jmp_scale.with_loss_scale(optax.sgd(0.5), loss_scale)
      >>> params = jnp.float32(1.0)
      >>> state = tx.init(params)
      >>> for g in (1.0, jnp.inf):
      ...     updates, state = tx.update(jnp.float32(g), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     s = state.loss_scale.loss_scale
      ...     print(float(params), float(s), int(state.skipped))
      0.5 32768.0 0
      0.5 16384.0 1
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "with_loss_scale: expected inner to be an optax.GradientTransformation, "
            f"got {inner!r}; pass the optimizer first, the loss scale second, and of "
            "an optax.MultiSteps its gradient_transformation()"
        )
    loss_scale = NoOpLossScale() if loss_scale is None else loss_scale
    loss_scale = checked_loss_scale("with_loss_scale", loss_scale)
    agree = _mesh.agreement("with_loss_scale", axis_name)
    if guard is not None and not isinstance(guard, SpikeGuard):
        raise TypeError(
            f"with_loss_scale: expected guard to be a SpikeGuard, got {guard!r}; write "
            "guard=SpikeGuard()"
        )
    inner = optax.with_extra_args_support(inner)
    keywords = keywords_of(inner.update)

    def init(params: optax.Params) -> LossScaleState:
        inner_state = inner.init(params)
        _refuse_nesting(inner_state)
        if not find_half_states(inner_state):
            _warn_of_half_precision(params)
        state = LossScaleState(
            loss_scale=loss_scale,
            inner_state=inner_state,
            guard=guard,
            **{name: jnp.asarray(value) for name, value in START.items()},
        )
        return fresh_buffers(state, (params, loss_scale, guard))

    def update(
        updates: optax.Updates,
        state: LossScaleState,
        params: optax.Params | None = None,
        *positional: Any,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        _check_arguments(updates, state, params, positional)
        grads = promote_to_float32(updates)
        verdict = judge_step(updates, value, state.guard, agree)
        gives_value = takes_value(keywords, value, extra_args)
        given = {"value": jnp.asarray(value)} if gives_value else {}
        if "grad" in extra_args:
            given["grad"] = promote_to_float32(extra_args.pop("grad"))
        for name in ("value_fn", "grad_fn", "obj_fn"):
            if callable(fun := extra_args.get(name)):
                extra_args[name] = _zero_fn_unless(verdict.applied, fun)

        # Cast to half precision, the updates of with_half_parameters would lose digits.
        keeps_dtypes = params is None or find_half_states(state.inner_state)

        def run(inputs: tuple[Any, Any], inner_state: Any) -> tuple[Any, Any]:
            grads, given = inputs
            with _noting_the_state():
                out, new = inner.update(
                    grads, inner_state, params, **extra_args, **given
                )
            if not keeps_dtypes:
                out = jax.tree.map(_cast_leaf, out, params, is_leaf=is_nothing)
            return out, _state_like(new, inner_state)

        is_half = _half_leaves(updates) and _half_leaves(params)
        if (
            is_half
            and not keeps_dtypes
            and not _takes(run, (grads, given), state.inner_state)
        ):
            grads = updates
        # The overflow of a gradient that the optimizer asks for shows in its updates.
        is_finite = functools.partial(finite, agree=agree)
        is_good = is_finite if "grad_fn" in extra_args else None
        inputs, context = (grads, given), (params, extra_args)
        applied, new_updates, inner_state = select_step(
            verdict.applied, run, inputs, state.inner_state, context, is_good
        )
        return new_updates, _next_state(state, verdict, applied, inner_state)

    update.agreement = agree  # pyright: ignore[reportFunctionMemberAccess]
    return LossScaleTransformation(init, update)  # pyright: ignore


class _Verdict(NamedTuple):
    """What is known of a step before the optimizer runs: bool[], and the next guard."""

    loss_finite: Any
    only_grads_finite: Any  # without the loss, unlike grads_finite of the state
    spike: Any
    applied: Any
    guard: SpikeGuard | None = None


def judge_step(
    updates: Any, value: Any, guard: SpikeGuard | None, agree: _mesh.Agreement | None
) -> _Verdict:
    agree = agree or _mesh.agreement()
    if value is not None and not (is_data(value) and jnp.shape(value) == ()):
        raise ValueError(
            f"with_loss_scale: expected value to be the scalar loss, got {value!r}; "
            "pass the loss alone"
        )
    loss_finite = jnp.array(True) if value is None else finite(value, agree)
    if guard is None:
        only_grads_finite, spike = finite(updates, agree), jnp.array(False)
        applied = only_grads_finite & loss_finite
        return _Verdict(loss_finite, only_grads_finite, spike, applied)
    # What is decided here has no derivative: a norm's is infinite at 0, times 0 NaN.
    guard, updates, value = map_inexact(lax.stop_gradient, (guard, updates, value))
    only_grads_finite, norm = finite_and_norm(updates, agree)
    is_finite = only_grads_finite & loss_finite
    # The largest loss of all devices: a replica must not skip alone.
    loss = None
    if value is not None:
        loss = agree(lax.pmax, jnp.asarray(value).astype(jnp.float32))
        # A float64 loss beyond float32's range is finite: the largest leap of all.
        loss = jnp.where(loss_finite, jnp.nan_to_num(loss), jnp.nan)
    spike, guard = guard.judge(loss, norm, is_finite)
    return _Verdict(loss_finite, only_grads_finite, spike, is_finite & ~spike, guard)


def _next_state(
    state: LossScaleState, verdict: _Verdict, applied: jax.Array, inner_state: Any
) -> LossScaleState:
    loss_finite, only_grads_finite, spike, expected, guard = verdict
    # What turned out to be bad within the optimizer is an overflow too.
    only_grads_finite &= applied | ~expected
    # No S makes a spike smaller: for S it is like a loss that is not finite.
    loss_scale = state.loss_scale.adjust(
        only_grads_finite, loss_finite=loss_finite & ~spike
    )
    return LossScaleState(
        loss_scale=loss_scale,
        inner_state=inner_state,
        grads_finite=only_grads_finite & loss_finite,
        applied=applied,
        skipped=state.skipped + jnp.int32(~applied),
        skipped_in_a_row=jnp.where(applied, 0, state.skipped_in_a_row + 1),
        nonfinite_losses=state.nonfinite_losses + jnp.int32(~loss_finite),
        spikes=state.spikes + jnp.int32(spike),
        guard=guard,
    )


@contextlib.contextmanager
def _noting_the_state() -> Iterator[None]:
    """Adds to an optimizer's own error why its state may not fit."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.add_note(
            "with_loss_scale: raised by the optimizer that it wraps. If its state was "
            "made by init of other parameters, keep one state for each optimizer and "
            "model: a GAN has two"
        )
        raise


def _refuse_nesting(inner_state: Any) -> None:
    nested = find_loss_scale_states(inner_state)
    if nested:
        where = jax.tree_util.keystr(nested[0][0])
        raise ValueError(
            "with_loss_scale: expected an optimizer without a loss scale, got one with "
            f"with_loss_scale within, at inner_state{where}; wrap once, outermost"
        )


def _warn_of_half_precision(params: Any) -> None:
    for path, dtype in _half_leaves(params)[:1]:
        warn(
            "with_loss_scale: expected float32 parameters, got "
            f"{jax.tree_util.keystr(path) or '(the whole tree)'} of {dtype}, "
            "which loses every update below its last digit; keep them in float32 "
            f'(jmp_scale.get_policy("params=float32,compute={dtype}").cast_to_param('
            "params)) and cast them in the loss, or keep what they lose: "
            "with_loss_scale(jmp_scale.with_half_parameters(optimizer))"
        )


def _half_leaves(tree: Any) -> list[tuple[Any, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(path, x.dtype) for path, x in leaves if holds_half(x)]


def _check_arguments(updates: Any, state: Any, params: Any, positional: Any) -> None:
    are_states = [isinstance(x, LossScaleState) for x in (updates, state, params)]
    if positional or are_states != [False, True, False]:
        given = (type(x).__name__ for x in (updates, state, params, *positional))
        raise TypeError(
            "with_loss_scale: expected update(grads, state, params, value=loss), got "
            f"update({', '.join(given)}); the state is the LossScaleState that init "
            "returns, or from an optimizer without a loss scale, what "
            "jmp_scale.checkpoints.restore_without_loss_scale makes of its state"
        )
    while isinstance(params, optax.LookaheadParams):
        params = params.fast
    if params is None:
        return

    def compare(update: Any, param: Any) -> None:
        if not is_nothing(update):  # which may stand for a whole subtree
            jax.tree.map(lambda *_: None, param, update, is_leaf=is_nothing)

    try:
        jax.tree.map(compare, updates, params, is_leaf=is_nothing)
    except ValueError as error:
        raise ValueError(
            "with_loss_scale: expected gradients of the structure of the parameters, "
            f"got\n  gradients:  {jax.tree.structure(updates)}\n"
            f"  parameters: {jax.tree.structure(params)}"
        ) from error


def _takes(run: Callable[[Any, Any], Any], inputs: Any, inner_state: Any) -> bool:
    """Whether float32 gradients fit: branches (`optax.novograd`) may want half ones."""
    try:
        jax.eval_shape(lambda: run(inputs, inner_state)[0])
    except TypeError:
        return False
    return True


def fresh_buffers(state: Any, params: Any = ()) -> Any:
    """Strongly typed arrays that share no buffer with each other or with `params`."""
    # An optimizer may start from the very parameters; a buffer is donated only once.
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}

    def fresh_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, bool, int, float, complex)):
            return leaf
        array = jnp.asarray(leaf)
        # A weak type becomes a strong one in the first step: another compilation.
        if getattr(array, "weak_type", False):  # typed keys have no such attribute
            array = jnp.asarray(array, array.dtype)
        array = jnp.copy(array) if id(array) in taken else array
        taken.add(id(array))
        return array

    return jax.tree.map(fresh_leaf, state)


def _zero_fn_unless(applied: jax.Array, fun: Callable[..., Any]) -> Callable[..., Any]:
    def zero_fn(*args: Any, **kwargs: Any) -> Any:
        # Otherwise the gradient is 0 times that of `fun`: NaN where that is not finite.
        args, kwargs = unless(applied, (args, kwargs), lax.stop_gradient)
        return unless(applied, fun(*args, **kwargs), jnp.zeros_like)

    return zero_fn


def _cast_leaf(x: Any, like: Any) -> Any:
    castable = is_inexact(x) and is_inexact(like)
    return jnp.asarray(x).astype(jnp.result_type(like)) if castable else x


def _state_like(new: Any, old: Any) -> Any:
    """A new state with the dtypes and shardings of the old one; else an error."""
    treedef, old_treedef = jax.tree.structure(new), jax.tree.structure(old)
    if treedef != old_treedef:
        raise ValueError(
            "with_loss_scale: expected inner to keep the structure of its state, got\n"
            f"  from update: {treedef}\n  from init:   {old_treedef}\n"
            "Let init return all that update does; what only measures, such as "
            "optax.monitor, goes beside the optimizer"
        )

    def leaf_like(path: Any, x: Any, y: Any) -> Any:
        x = _mesh.reshard_like(_cast_leaf(x, y), y)
        if x is y or not (hasattr(x, "dtype") and hasattr(y, "dtype")):
            return x
        expected, got = jax.typeof(y), jax.typeof(x)
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            expected, got = (f"{t.dtype}{list(t.shape)}" for t in (expected, got))
            raise ValueError(
                "with_loss_scale: expected inner to keep the types of its state, but "
                f"leaf {jax.tree_util.keystr(path)} is {expected} after init and {got} "
                "after update; initialize it with parameters of a floating-point dtype"
            )
        return x

    return jax.tree_util.tree_map_with_path(leaf_like, new, old)
