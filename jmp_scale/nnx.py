"""Flax NNX: an `Optimizer` that skips a step as a whole."""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _flax  # isort: skip  (before Flax: it names the extra when Flax is missing)

import jax
import optax
from flax import nnx
from jax.typing import ArrayLike

from ._finite import all_finite
from ._gradients import value_and_grad
from ._loss_scale import LossScale
from ._spike_guard import SpikeGuard
from ._tree import select_tree
from ._variables import Leaves, graph_nodes, put_back, values_of, written_since


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` with a loss scale: a skipped step leaves all as it was.

    A train step is the one of Flax's examples with two lines changed: the gradients
    come from `optimizer.value_and_grad`, and `update` is passed the loss.

    ```python
    loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads, value=loss)
    ```

    A skipped step leaves parameters, optimizer state and `step` bit-identical; `step`
    counts applied steps here. `nnx.Optimizer(model, jmp_scale.with_loss_scale(tx,
    loss_scale), wrt=nnx.Param)` skips too, but keeps non-finite BatchNorm statistics,
    and its `step` counts every call.

    **What the forward pass wrote.** The forward pass of an NNX model writes to the
    model: BatchNorm statistics, random streams, caches. A skipped step puts all of it
    back, in every module among the arguments of the loss function: `value_and_grad`
    where the loss or a gradient is not finite, and `update` where it skips the step
    for any other reason, such as a spike. Variables may hold anything: arrays, numbers,
    dicts, None.

    - A compiled step has one structure. Where the forward pass makes a new variable, or
      changes a variable's structure or shape (`sow` appends to a tuple, a cache grows),
      that stays on a skipped step too: entries that were there before are put back, and
      new ones keep their values, with 0 in place of those that are not finite.
    - `nnx.Intermediate` variables stay as they were sown, for inspection.
    - `update` puts back what this optimizer's `value_and_grad` wrote in the same
      compiled function, or outside of any. If the two are called in different compiled
      functions, only `value_and_grad` puts back, so a spike leaves the statistics of
      its forward pass.

    To accumulate gradients, pass an `optax.MultiSteps` as `tx` instead of adding them:
    each micro-batch is then kept or skipped as a whole.

    Args:
      model: the NNX model.
      tx: any Optax optimizer; used as it is if it is `with_loss_scale(...)`.
      loss_scale: the initial loss scale; default `NoOpLossScale()`.
      guard: a `SpikeGuard` skips steps whose loss or gradient norm leaps, too.
      wrt: filter of the trained variables; default `nnx.Param`.
      **kwargs: further arguments of `nnx.Optimizer`.

    Raises:
      ValueError: `loss_scale` or `guard` is given and `tx` already is
        `with_loss_scale(...)`, or contains it somewhere inside.

    Examples:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from flax import nnx
      >>> from jmp_scale.nnx import Optimizer
      >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> loss_scale = jmp_scale.DynamicLossScale(2.0**15)
      >>> optimizer = Optimizer(model, optax.sgd(0.1), loss_scale=loss_scale)
      >>> def loss_fn(model, x):
      ...   return model(x).mean() * jnp.inf
      >>> loss, grads = optimizer.value_and_grad(loss_fn)(model, jnp.ones((1, 1)))
      >>> _ = optimizer.update(model, grads)
      >>> int(optimizer.step[...]), float(optimizer.loss_scale.loss_scale)
      (0, 16384.0)
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        *,
        loss_scale: LossScale | None = None,
        guard: SpikeGuard | None = None,
        wrt: Any = nnx.Param,
        **kwargs: Any,
    ) -> None:
        tx = _flax.wrap_once(
            "nnx.Optimizer",
            tx,
            nnx.state(model, wrt),
            loss_scale=loss_scale,
            guard=guard,
        )
        super().__init__(model, tx, wrt=wrt, **kwargs)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next step, with plain arrays as leaves."""
        return jax.tree.map(
            lambda x: x[...] if _is_variable(x) else x,
            self.opt_state.loss_scale,
            is_leaf=_is_variable,
        )

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> Callable[..., tuple[Any, Any]]:
        """`nnx.value_and_grad` with this optimizer's loss scale.

        Args:
          loss_fn: the whole loss, a function of the model and more.
          argnums: position of the model among the arguments of `loss_fn`, or several
            positions, as for `nnx.value_and_grad`. Of a module, only the variables of
            `wrt` are differentiated; `nnx.DiffState(position, filter)` says otherwise.
            In Flax's tree mode (`graph=False`), which has no filters, all of them are.
          has_aux: whether `loss_fn` returns `(loss, aux)`.
          **kwargs: further arguments of `nnx.value_and_grad`.

        Returns:
          A function of the arguments of `loss_fn` that returns `(loss, grads)` or
          `((loss, aux), grads)`: the unscaled loss and the unscaled float32 gradients
          (a tuple of them for several positions). Where these are not all finite, what
          the forward pass wrote to modules among the arguments is put back.
        """

        def value_and_grad_or_put_back(
            *args: Any, **fun_kwargs: Any
        ) -> tuple[Any, Any]:
            if fun_kwargs:  # nnx.value_and_grad takes arguments by position only
                bound = inspect.signature(loss_fn).bind(*args, **fun_kwargs)
                bound.apply_defaults()
                args, fun_kwargs = bound.args, bound.kwargs
            fun = value_and_grad(
                loss_fn,
                self.loss_scale,
                _diff_states(argnums, self.wrt, len(args), kwargs),
                has_aux,
                transform=nnx.value_and_grad,
                **kwargs,
            )
            nodes = graph_nodes(args)
            # Before the call, which writes into the modules themselves.
            before = values_of(nodes)
            value, grads = fun(*args, **fun_kwargs)
            # The loss too: an infinite term without a gradient leaves the gradients
            # finite (test_a_loss_that_alone_is_not_finite_puts_the_statistics_back).
            finite = all_finite((value[0] if has_aux else value, grads))
            written = written_since(nodes, before)
            put_back(finite, nodes, written)
            self._remember(nodes, written)
            return value, grads

        return value_and_grad_or_put_back

    def update(
        self,
        model: Any,
        grads: Any,
        /,
        *,
        value: ArrayLike | None = None,
        **kwargs: Any,
    ) -> Any:
        """Updates parameters, optimizer state and `step`, or nothing on a skipped step.

        Args:
          model: the model that the optimizer was made for.
          grads: unscaled gradients, as `value_and_grad` returns them.
          value: the unscaled loss, a scalar. A non-finite one skips the step too, and
            leaves S alone.
          **kwargs: extra arguments of `tx`.

        Returns:
          What `nnx.Optimizer.update` returns: the updates, from Flax 0.12.1 on.
        """
        step = _array_of(self.step)
        forward_pass = _FORWARD_PASSES.pop(self, None)
        updates = super().update(model, grads, value=value, **kwargs)
        applied = _array_of(self.opt_state.applied)
        # nnx.Optimizer has counted the call already
        # (test_a_skipped_step_leaves_all_that_training_keeps_bit_identical).
        self.step[...] = select_tree(applied, _array_of(self.step), step)
        if forward_pass is not None and forward_pass.step is step:
            put_back(applied, forward_pass.nodes, forward_pass.written)
        return updates

    def _remember(self, nodes: Sequence[Any], written: Leaves) -> None:
        """Keeps what the forward passes since the last `update` wrote, for `update`.

        Not for an optimizer that a compiled function closes over: its record would
        outlive the trace, with tracers in it. `update` cannot be called there either.
        """
        if not written or not self.step._trace_state.is_valid():
            return
        step, last = _array_of(self.step), _FORWARD_PASSES.get(self)
        if last is not None and last.step is step and _same(last.nodes, nodes):
            written = {**written, **last.written}  # the values before the first of them
        _FORWARD_PASSES[self] = _ForwardPass(step, nodes, written)


class _ForwardPass(NamedTuple):
    """What forward passes wrote, and what stood there before.

    An `update` in another compiled function leaves no trace here but in `step`: a
    record of another step is stale.
    """

    step: jax.Array
    nodes: Sequence[Any]
    written: Leaves


# Not an attribute, which NNX would take as part of the state. And gone with the
# optimizer, which in a compiled function is a copy that lives as long as the trace.
_FORWARD_PASSES: weakref.WeakKeyDictionary[Optimizer, _ForwardPass] = (
    weakref.WeakKeyDictionary()
)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _array_of(variable: nnx.Variable) -> jax.Array:
    """Its array itself: `variable[...]` is a copy in Flax 0.12.0."""
    (array,) = jax.tree.leaves(variable)
    return array


def _diff_states(argnums: Any, wrt: Any, count: int, kwargs: Mapping[str, Any]) -> Any:
    """`argnums` with the filter `wrt` for plain positions, none of them negative."""
    if isinstance(argnums, Sequence):
        return tuple(_diff_states(argnum, wrt, count, kwargs) for argnum in argnums)
    is_state = isinstance(argnums, nnx.DiffState)
    position, wrt = (argnums.argnum, argnums.filter) if is_state else (argnums, wrt)
    position = position + count if position < 0 else position
    if not is_state and _in_tree_mode(kwargs):
        return position
    return nnx.DiffState(position, wrt)


def _in_tree_mode(kwargs: Mapping[str, Any]) -> bool:
    """Whether `nnx.value_and_grad` takes positions only, in a mode of newer Flax."""
    modes = {"graph": "set_graph_mode", "graph_updates": "set_graph_updates"}
    for argument, switch in modes.items():
        value = kwargs.get(argument)
        if value is None and hasattr(nnx, switch):
            value = getattr(nnx, switch).current_value()
        if value is False:
            return True
    return False


def _same(nodes: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(nodes) == len(others) and all(
        a is b for a, b in zip(nodes, others, strict=True)
    )
