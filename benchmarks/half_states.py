"""How optimizers train with moving averages in bfloat16, by how these are rounded.

The digits classifier of `half_parameters.py` in float32, so that nothing but the
averages differs: stored in float32, rounded to nearest after each step, and rounded
stochastically by `with_half_storage`. Starts and batches are the same in all three. The
loss is the mean over the last tenth of the steps, a change that of the same seed over
float32 averages: its mean, and from the least to the largest.
"""

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import _harness
import half_parameters
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table
from half_parameters import Task
from jax import lax
from tqdm import tqdm

import jmp_scale

contrib: Any = optax.contrib
ADAM = ("mu", "nu")


class Row(NamedTuple):
    """An optimizer of a learning rate's schedule, and the averages that are stored."""

    make: Callable[[optax.Schedule], optax.GradientTransformation]
    names: Collection[str] = ADAM
    rates: Sequence[str] = ("1e-3",)


def times(factor: float, schedule: optax.Schedule) -> optax.Schedule:
    return lambda count: factor * schedule(count)


ROWS = {
    "AdamW, b2 .999": Row(
        functools.partial(optax.adamw, b2=0.999), rates=("1e-3", "1e-4")
    ),
    "AdamW, b2 .95": Row(functools.partial(optax.adamw, b2=0.95)),
    "AMSGrad, b2 .999": Row(functools.partial(optax.amsgrad, b2=0.999)),
    "RMSprop, decay .999": Row(functools.partial(optax.rmsprop, decay=0.999), ("nu",)),
    "Lion": Row(lambda rate: optax.lion(times(0.1, rate)), ("mu",)),
    "SGD, momentum .9": Row(
        lambda rate: optax.sgd(times(100, rate), momentum=0.9), ("trace",)
    ),
    "Muon": Row(contrib.muon),
    "Prodigy": Row(
        lambda rate: contrib.prodigy(times(1000, rate)), ("exp_avg", "exp_avg_sq")
    ),
}


def nearest(
    inner: optax.GradientTransformation, names: Collection[str]
) -> optax.GradientTransformation:
    """The same averages as `with_half_storage` rounds, cast to bfloat16 and back."""
    rounded = jmp_scale.with_half_storage(inner, key=jax.random.key(0), averages=names)

    def init(params: Any) -> Any:
        like = jax.eval_shape(rounded.init, params).inner_state
        return optax.tree.cast_like(inner.init(params), like)

    def update(updates: Any, state: Any, params: Any) -> Any:
        wide = jax.eval_shape(inner.init, params)
        wide = optax.tree.cast_like(state, wide)
        updates, new = inner.update(updates, wide, params)
        return updates, optax.tree.cast_like(new, state)

    return optax.GradientTransformation(init, update)  # pyright: ignore


FORMS: dict[str, Callable[[Any, Collection[str], jax.Array], Any]] = {
    "float32": lambda inner, names, key: inner,
    "to nearest": lambda inner, names, key: nearest(inner, names),
    "stochastic": lambda inner, names, key: jmp_scale.with_half_storage(
        inner, key=key, averages=names
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    _harness.round_as_written()
    parser = _harness.parser(__doc__)
    _harness.add_several(parser, "--optimizers", ROWS, ROWS, "to train with")
    parser.add_argument("--seeds", type=int, default=5, help="of each form")
    parser.add_argument("--steps", type=int, default=2000, help="of each training")
    args = parser.parse_args(argv)
    task = half_parameters.TASKS["digits"]()._replace(steps=args.steps)
    columns = ["optimizer", "rate", *FORMS, *(f"change, {x}" for x in [*FORMS][1:])]
    table = Table("Last training loss", columns)
    found = [table]
    for name in tqdm(args.optimizers, "optimizers"):
        for rate, losses in train_all(task, ROWS[name], args.seeds).items():
            table.rows.append([name, rate, *last_losses(losses)])
            title = f"{name}, learning rate {rate}, by step"
            found.append(half_parameters.curves(title, losses))
    _harness.report(found, args.json)


def train_all(task: Task, row: Row, seeds: int) -> dict[str, dict[str, np.ndarray]]:
    """Training losses f32[seeds, steps] of each learning rate and form."""
    key = jax.random.key(0)
    starts = jax.jit(jax.vmap(task.init))(jax.random.split(key, seeds))
    batch_keys = jax.random.split(jax.random.fold_in(key, 1), (seeds, task.steps))
    batches = jax.jit(jax.vmap(jax.vmap(task.examples)))(batch_keys)
    losses: dict[str, Any] = {rate: {} for rate in row.rates}
    for form, wrap in FORMS.items():
        run = jax.jit(trainer(task, row, wrap))
        for rate in row.rates:
            runs = []
            for seed in range(seeds):
                own = jax.tree.map(operator.itemgetter(seed), (starts, batches))
                runs.append(run(*own, jax.random.key(seed), float(rate)))
            losses[rate][form] = np.stack(runs)
    return losses


def trainer(task: Task, row: Row, wrap: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A training: losses f32[steps] of parameters, batches, a key and a rate."""

    def run(params: Any, batches: Any, key: jax.Array, rate: Any) -> jax.Array:
        cosine = optax.cosine_decay_schedule(1.0, task.steps)
        tx = wrap(row.make(lambda count: rate * cosine(count)), row.names, key)

        def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, state = carry
            loss, grads = jax.value_and_grad(task.loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        # Strongly typed, as the carry of a scan has to be.
        state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), tx.init(params))
        return lax.scan(step, (params, state), batches)[1]

    return run


def last_losses(losses: dict[str, np.ndarray]) -> list[str]:
    """Medians over the seeds; mean changes over float32, with the least and largest."""
    last = {form: half_parameters.last_tenth(x) for form, x in losses.items()}
    cells = [f"{np.median(of_form):.3g}" for of_form in last.values()]
    for form in [*FORMS][1:]:
        changes = 100 * (last[form] / last["float32"] - 1)
        numbers = changes.mean(), changes.min(), changes.max()
        mean, low, high = (f"{round(float(x), 1) + 0:+}" for x in numbers)  # no -0.0
        cells.append(f"{mean} % ({low} to {high})")
    return cells


if __name__ == "__main__":
    main()
