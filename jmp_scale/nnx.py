"""Flax NNX: an `Optimizer` that skips a step as a whole."""

from collections.abc import Callable
from typing import Any

from . import _flax  # isort: skip  (before Flax: it names the extra when Flax is missing)

import jax
import optax
from flax import nnx
from jax.typing import ArrayLike

from ._finite import all_finite
from ._gradients import value_and_grad
from ._loss_scale import LossScale
from ._tree import select_tree


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` with a loss scale: a step that overflows changes nothing of what is trained.

    A train step is that of Flax's examples with two lines changed: gradients come from
    `optimizer.value_and_grad`, and `update` is told the loss::

        loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads, value=loss)

    The forward pass of an NNX model writes to the model: BatchNorm statistics, random streams, caches.
    `value_and_grad` puts all of it back where the loss or its gradients are not finite, and `update`
    then leaves parameters, optimizer state and `step`, which here counts applied steps.
    `nnx.Optimizer(model, jmp_scale.with_loss_scale(tx, loss_scale), wrt=nnx.Param)` skips too, but
    leaves BatchNorm statistics non-finite, and its `step` counts on.

    The decision on the model is made for each call of `value_and_grad`. To accumulate gradients, give
    `tx` an `optax.MultiSteps` rather than summing by hand, and each micro-batch is kept or skipped whole.

    Args:
      model: the NNX model.
      tx: any Optax optimizer; taken as it is if it already is `with_loss_scale(...)`.
      loss_scale: the initial loss scale; default `NoOpLossScale()`.
      wrt: filter of the trained variables; default `nnx.Param`.
      **kwargs: further arguments of `nnx.Optimizer`.

    Raises:
      ValueError: `loss_scale` is given, and `tx` has one already.

    Example:
      >>> import jax.numpy as jnp, jmp_scale, optax
      >>> from flax import nnx
      >>> from jmp_scale.nnx import Optimizer
      >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, optax.sgd(0.1), loss_scale=jmp_scale.DynamicLossScale(2.0**15))
      >>> loss, grads = optimizer.value_and_grad(lambda m, x: m(x).mean() * jnp.inf)(model, jnp.ones((1, 1)))
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
        wrt: Any = nnx.Param,
        **kwargs: Any,
    ) -> None:
        tx = _flax.wrap_once(tx, loss_scale, nnx.state(model, wrt))
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
        argnums: int | nnx.DiffState = 0,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> Callable[..., Any]:
        """`nnx.value_and_grad` with this optimizer's loss scale: true loss, true f32 gradients.

        Args:
          loss_fn: the whole loss, a function of the model and more.
          argnums: position of the model among `loss_fn`'s arguments.
          has_aux: whether `loss_fn` returns `(loss, aux)`.
          **kwargs: further arguments of `nnx.value_and_grad`.

        Returns:
          A function of `loss_fn`'s arguments that returns `(loss, grads)` or `((loss, aux), grads)`. When
          these are not all finite, the model's variables other than `wrt` are as they were before.

        Raises:
          TypeError: the model is not given by position.
        """
        diff: Any = (
            argnums
            if isinstance(argnums, nnx.DiffState)
            else nnx.DiffState(argnums, self.wrt)
        )
        fun = value_and_grad(
            loss_fn,
            self.loss_scale,
            diff,
            has_aux,
            transform=nnx.value_and_grad,
            **kwargs,
        )

        def value_and_grad_or_put_back(
            *args: Any, **fun_kwargs: Any
        ) -> tuple[Any, Any]:
            if diff.argnum >= len(args):
                raise TypeError(
                    "value_and_grad: give the model by position, so that it can be put back"
                )
            variables = _written_variables(args[diff.argnum], self.wrt)
            before = [variable[...] for variable in variables]
            value, grads = fun(*args, **fun_kwargs)
            finite = all_finite((value[0] if has_aux else value, grads))
            after = select_tree(
                finite, [variable[...] for variable in variables], before
            )
            for variable, x in zip(variables, after, strict=True):
                variable[...] = x
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
        """Updates parameters, optimizer state and `step`, or none of them if the step is skipped.

        Args:
          model: the model that the optimizer was made for.
          grads: true gradients, as `value_and_grad` gives them.
          value: the true loss, a scalar; a non-finite one skips the step too, and leaves S alone.
          **kwargs: extra arguments of `tx`.

        Returns:
          What `nnx.Optimizer.update` returns: the updates, from Flax 0.12.1 on.
        """
        step = self.step[...]
        updates = super().update(model, grads, value=value, **kwargs)
        finite = self.opt_state.grads_finite[...]
        self.step[...] = select_tree(finite, self.step[...], step)
        return updates


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _written_variables(model: Any, wrt: Any) -> list[nnx.Variable]:
    """What a forward pass may change and the next one reads: `nnx.state` gives the model's own Variables."""
    state = nnx.state(model, nnx.All(nnx.Not(wrt), nnx.Not(nnx.Intermediate)))
    return [x for x in jax.tree.leaves(state, is_leaf=_is_variable) if _is_variable(x)]
