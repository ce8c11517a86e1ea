"""Flax NNX: an `Optimizer` with a loss scale, and `autocast` for its modules."""

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

from . import _flax  # isort: skip  (before Flax: it names the extra when Flax is missing)

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from ._autocast.autocast import autocast as _autocast
from ._autocast.marks import MarkedLayer
from ._scaling.gradients import value_and_grad
from ._scaling.spike_guard import SpikeGuard
from ._scaling.transform import LossScaleTransformation
from ._state import LossScale
from ._tree import find_nodes, is_data, is_inexact, with_arrays
from ._types import Flag, Function, KeyPath, PyTree
from ._validation import require_function

F = TypeVar("F", bound=Function)
_AUTOCAST = "jmp_scale.nnx.autocast"  # name of a context of Flax
_Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]
_Node = nnx.Pytree | nnx.Variable
_Path = tuple[Hashable, ...]
nnx.register_data_type(MarkedLayer)  # otherwise Flax refuses it as an attribute


def autocast(fun: F, dtype: DTypeLike | None = None, **options: Any) -> F:
    """Returns a function of NNX modules cast as by `jmp_scale.autocast`.

    `dtype` and `options` are those of `jmp_scale.autocast`. The function may write
    variables (BatchNorm statistics, random streams) and Python attributes of modules.

    Raises:
      ValueError: at the call, `fun` sets an attribute that is not an `nnx.Variable` to
        an array.
    """
    require_function("autocast", fun)

    @functools.wraps(fun)
    def on_tree(tree: PyTree) -> tuple[PyTree, PyTree]:
        args, kwargs = nnx.from_tree(tree, ctxtag=_AUTOCAST, is_inner=True)
        nodes = _graph_nodes((args, kwargs))
        before = list(map(_parts, nodes))
        out = fun(*args, **kwargs)
        _refuse_lost_arrays(nodes)
        # Flax refuses to write variables of an outer trace, even unchanged ones.
        written = [x for x, old in zip(nodes, before, strict=True) if _differs(x, old)]
        return out, nnx.to_tree(written, ctxtag=_AUTOCAST)

    half = _autocast(on_tree, dtype, **options)

    @functools.wraps(fun)
    def in_half_precision(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with nnx.update_context(_AUTOCAST):
            out, nodes = half(nnx.to_tree((args, kwargs), ctxtag=_AUTOCAST))
            nnx.from_tree(nodes, ctxtag=_AUTOCAST, is_inner=False)
        return out

    return in_half_precision  # pyright: ignore[reportReturnType]


def _parts(node: _Node) -> tuple[Any, list[Any]]:
    """Returns structure and arrays; a state would hold variables, which may change."""
    structure, state = nnx.split(node)
    return structure, jax.tree.leaves(state)


def _differs(node: _Node, before: tuple[Any, list[Any]]) -> bool:
    """Whether a node has another structure than before, or holds other arrays."""
    structure, arrays = _parts(node)
    pairs = zip(arrays, before[1], strict=True)
    return structure != before[0] or any(x is not y for x, y in pairs)


def _refuse_lost_arrays(nodes: list[_Node]) -> None:
    """Raises an error if an array is an attribute that Flax takes for a constant."""
    known = {id(x) for x in jax.tree.leaves(nnx.state(nodes))}
    for path, module in nnx.iter_graph(nodes):
        attributes = vars(module) if isinstance(module, nnx.Pytree) else {}
        for name, x in attributes.items():
            if isinstance(x, Tracer) and id(x) not in known:
                where = ".".join(map(str, (*path[1:], name)))
                raise ValueError(
                    "nnx.autocast: expected arrays in variables, but the function sets "
                    f"{where!r} to an array, which Flax does not return; make it an "
                    "nnx.Variable, or return it"
                )


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` with a loss scale, which skips a step as a whole.

    Use `optimizer.value_and_grad` to compute gradients, and pass the loss to `update`.
    Here `step` counts applied steps only.

    **Variables that the forward pass wrote** (BatchNorm statistics, random streams,
    caches) are restored by `value_and_grad` on a skipped step, in every module among
    the arguments of the loss. `nnx.Intermediate` variables stay as they were sown. A
    new variable, structure or shape stays too; its elements that are not finite are 0.

    `value_and_grad` decides like `update`, from its own loss and gradients: with a
    guard, pass `value` to `update` too. If you change or accumulate gradients in
    between, the two may differ; to accumulate, pass an `optax.MultiSteps` as `tx`.

    Args:
      model: the NNX model.
      tx: any Optax optimizer; not wrapped again if it is `with_loss_scale(...)`.
      loss_scale: initial, as in `with_loss_scale`.
      guard: a `SpikeGuard`, as in `with_loss_scale`.
      wrt: filter of the trained variables; default `nnx.Param`.
      **kwargs: further arguments of `nnx.Optimizer`.

    Raises:
      ValueError: `loss_scale` or `guard` is given twice, or `tx` wraps another.
    """

    def __init__(
        self,
        model: PyTree,
        tx: optax.GradientTransformation,
        *,
        loss_scale: LossScale | None = None,
        guard: SpikeGuard | None = None,
        wrt: nnx.filterlib.Filter = nnx.Param,
        **kwargs: Any,
    ) -> None:
        tx = _flax.wrap_once("nnx.Optimizer", tx, loss_scale, guard)
        super().__init__(model, tx, wrt=wrt, **kwargs)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next step, with plain arrays as leaves."""
        return with_arrays(self.opt_state.loss_scale)

    def value_and_grad(
        self,
        loss_fn: Function,
        argnums: _Argnums = 0,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> Callable[..., tuple[PyTree, PyTree]]:
        """Returns `nnx.value_and_grad` with this optimizer's loss scale.

        Arguments and results are those of `jmp_scale.value_and_grad`. Only the
        variables of a module that `wrt` selects are differentiated, or those that an
        `nnx.DiffState` in `argnums` selects.
        """

        def or_put_back(*args: PyTree, **fun_kwargs: PyTree) -> tuple[PyTree, PyTree]:
            if fun_kwargs:  # `nnx.value_and_grad` takes positional arguments only
                bound = inspect.signature(loss_fn).bind(*args, **fun_kwargs)
                bound.apply_defaults()
                args, fun_kwargs = bound.args, bound.kwargs
            trained = _trained(argnums, self.wrt, len(args))
            options = kwargs | {"transform": nnx.value_and_grad}
            fun = value_and_grad(loss_fn, self.loss_scale, trained, has_aux, **options)
            nodes = _graph_nodes(args)
            # The call writes into the modules, so their leaves are saved before.
            before = {path: _leaves(x) for path, x in _variables(nodes).items()}
            value, grads = fun(*args, **fun_kwargs)
            loss, guard = value[0] if has_aux else value, self.opt_state.guard
            tx = cast(LossScaleTransformation, self.tx)
            applied = tx.would_apply(grads, loss, with_arrays(guard))
            _put_back_unless(applied, nodes, before)
            return value, grads

        return or_put_back

    def update(
        self,
        model: PyTree,
        grads: PyTree,
        /,
        *,
        value: ArrayLike | None = None,
        **extra: Any,
    ) -> PyTree:
        """Updates the parameters, the optimizer state and `step`.

        A skipped step changes only the loss-scale state (S, flags, counters, guard).

        Args:
          model: the model that the optimizer was created with.
          grads: unscaled gradients, as `value_and_grad` returns them.
          value: the unscaled loss, as in `with_loss_scale`.
          **extra: extra arguments of `tx`.

        Raises:
          TypeError: the gradients come before the model.
        """
        if _has_modules(grads) and not _has_modules(model):
            raise TypeError(
                "nnx.Optimizer.update: expected the model before its gradients, got "
                f"{type(model).__name__} and {type(grads).__name__}; write "
                "optimizer.update(model, grads)"
            )
        step = with_arrays(self.step)
        updates = super().update(model, grads, value=value, **extra)
        # nnx.Optimizer counts each call, also that of a skipped step.
        self.step[...] = step + with_arrays(self.opt_state.applied).astype(step.dtype)
        return updates


def _trained(argnums: _Argnums, wrt: nnx.filterlib.Filter, count: int) -> Any:
    """Returns `argnums` with a filter `wrt` at positions, none of them negative."""
    if isinstance(argnums, Sequence):
        return tuple(_trained(argnum, wrt, count) for argnum in argnums)
    if isinstance(argnums, nnx.DiffState):
        return argnums
    return nnx.DiffState(argnums + count if argnums < 0 else argnums, wrt)


def _has_modules(tree: PyTree) -> bool:
    return any(isinstance(node, nnx.Pytree) for node in _graph_nodes(tree))


def _graph_nodes(args: PyTree) -> list[_Node]:
    """Returns modules and single variables among the arguments, in any containers."""
    found = find_nodes(lambda x: isinstance(x, (nnx.Pytree, nnx.Variable)), args)
    return [node for _, node in found]


def _variables(nodes: list[_Node]) -> dict[_Path, nnx.Variable]:
    """Returns variables that a forward pass may change, and plain arrays, by path."""
    return dict(nnx.to_flat_state(nnx.state(nodes, nnx.Not(nnx.Intermediate))))


def _leaves(variable: PyTree) -> dict[KeyPath, PyTree]:
    """Returns the leaves of a variable by path; it may contain a mutable dict."""
    return dict(jax.tree_util.tree_leaves_with_path(variable))


def _put_back_unless(
    keep: Flag, nodes: list[_Node], before: dict[_Path, dict[KeyPath, PyTree]]
) -> None:
    """Restores the variables that a forward pass wrote, unless `keep`."""
    selected = {}
    for path, variable in _variables(nodes).items():
        old, new = before.get(path, {}), _leaves(variable)
        if any(x is not old.get(p) for p, x in new.items()):
            leaves = [_select(keep, x, old.get(p)) for p, x in new.items()]
            selected[path] = jax.tree.unflatten(jax.tree.structure(variable), leaves)
    nnx.update(nodes, nnx.from_flat_state(selected))


def _select(keep: Flag, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` if `keep`, else `old`; without an `old`, `new` with NaNs as 0."""
    # An unwritten leaf is the same object, so parameters need no select.
    if new is old or not is_data(new):
        return new
    if is_data(old) and jnp.shape(old) == jnp.shape(new):
        return jnp.where(keep, new, jnp.asarray(old, jax.typeof(new).dtype))
    if is_inexact(new):
        # There is no old value, and a NaN in a statistic would stay.
        return jnp.where(keep | jnp.isfinite(new), new, jnp.zeros_like(new))
    return new
