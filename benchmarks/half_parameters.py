"""How bfloat16 parameters train, by what the optimizer keeps beside them.

A classifier of digits and the character transformer of the examples, with AdamW and a
cosine schedule, under `autocast` to bfloat16, on the same batches in every form. The
loss is the mean over the last tenth of the steps. "as float32" is said where the spread
over the seeds overlaps that of float32 parameters.
"""

import functools
import operator
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _half_models
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table
from _models import wide
from flax import nnx
from jax import lax
from sklearn.datasets import load_digits
from tqdm import tqdm

import jmp_scale

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import _language

SPREAD = ["median", "least", "largest"]
POINTS = 50  # of a curve


class Form(NamedTuple):
    """How parameters are stored and updated.

    Attributes:
      wrap: an optimizer that keeps what the form keeps, of an optimizer and a key.
      sizes: bytes a parameter of the parameter, of what is beside it, of the moments.
    """

    wrap: Callable[[Any, jax.Array], Any]
    sizes: tuple[int, int, int]
    dtype: Any = jnp.bfloat16


class Task(NamedTuple):
    """Something to train: parameters of a key, batches of a key, a float32 loss."""

    init: Callable[[jax.Array], Any]
    examples: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    steps: int


def main(argv: Sequence[str] | None = None) -> None:
    _harness.round_as_written()
    parser = _harness.parser(__doc__)
    for flag, choices in (("--tasks", TASKS), ("--forms", FORMS)):
        _harness.add_several(parser, flag, choices, choices, "to run")
    rates, text = ["1e-3", "1e-4", "1e-5"], "peaks of the learning rate"
    parser.add_argument("--rates", nargs="+", default=rates, help=text)
    parser.add_argument("--seeds", type=int, default=5, help="of each form")
    parser.add_argument(
        "--steps", type=int, help="of each training, default: the task's"
    )
    args = parser.parse_args(argv)
    found = [sizes()]
    for name in args.tasks:
        task = TASKS[name]()
        task = task._replace(steps=args.steps or task.steps)
        losses = train_all(task, args.rates, args.forms, args.seeds)
        for rate, of_rate in losses.items():
            title = f"{name}, learning rate {rate}"
            found += [results(title, of_rate), curves(f"{title}, by step", of_rate)]
    _harness.report(found, args.json)


def train_all(
    task: Task, rates: Sequence[str], forms: Sequence[str], seeds: int
) -> dict[str, Any]:
    """Training losses f32[seeds, steps] of each learning rate and form."""
    key = jax.random.key(0)
    starts = jax.jit(jax.vmap(task.init))(jax.random.split(key, seeds))
    batch_keys = jax.random.split(jax.random.fold_in(key, 1), (seeds, task.steps))
    batches = jax.jit(jax.vmap(jax.vmap(task.examples)))(batch_keys)
    losses: dict[str, Any] = {rate: {} for rate in rates}
    for form in tqdm(forms, "forms"):
        run = jax.jit(trainer(task, FORMS[form]))
        for rate in tqdm(rates, form, leave=False):
            runs = []
            for seed in range(seeds):  # faster than vmap on a CPU
                own = jax.tree.map(operator.itemgetter(seed), (starts, batches))
                runs.append(run(*own, jax.random.key(seed), float(rate)))
            losses[rate][form] = np.stack(runs)
    return losses


def trainer(task: Task, form: Form) -> Callable[..., jax.Array]:
    """A training: losses f32[steps] of float32 parameters, batches, a key and a rate.

    The learning rate is an argument, so that one compilation serves all.
    """
    half_loss = jmp_scale.autocast(task.loss, "bfloat16")

    def run(params: Any, batches: Any, key: jax.Array, rate: Any) -> jax.Array:
        def schedule(count: Any) -> Any:
            return rate * optax.cosine_decay_schedule(1.0, task.steps)(count)

        tx = form.wrap(optax.adamw(schedule), key)
        params = jax.tree.map(lambda p: p.astype(form.dtype), params)

        def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, state = carry
            loss, grads = jax.value_and_grad(half_loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return lax.scan(step, (params, tx.init(params)), batches)[1]

    return run


def sizes() -> Table:
    """Bytes a parameter, as arithmetic."""
    columns = ["form", "parameter", "beside it", "moments", "gradient", "sum"]
    table = Table("AdamW, bytes a parameter", columns)
    for name, form in FORMS.items():
        gradient = jnp.dtype(form.dtype).itemsize
        row = [*form.sizes, gradient]
        table.rows.append([name, *row, sum(row)])
    return table


def results(title: str, losses: dict[str, np.ndarray]) -> Table:
    """Of each form the last losses, f32[seeds, steps] a form."""
    table = Table(title, ["form", *SPREAD, "verdict"])
    reference = last_tenth(next(iter(losses.values())))
    for name, of_form in losses.items():
        last = last_tenth(of_form)
        is_as = last.min() <= reference.max() and last.max() >= reference.min()
        verdict = "as float32" if is_as else "not as float32"
        cells = [f"{of(last):.3g}" for of in (np.median, np.min, np.max)]
        table.rows.append([name, *cells, verdict])
    return table


def curves(title: str, losses: dict[str, np.ndarray]) -> Table:
    """Losses over the steps: medians over the seeds, of means over pieces."""
    table = Table(title, ["step", *losses])
    steps = next(iter(losses.values())).shape[1]
    for piece in np.array_split(np.arange(steps), min(POINTS, steps)):
        means = (np.median(x[:, piece].mean(1)) for x in losses.values())
        table.rows.append([int(piece[-1]) + 1, *(f"{x:.3g}" for x in means)])
    return table


def last_tenth(losses: np.ndarray) -> np.ndarray:
    steps = losses.shape[1]
    return losses[:, steps - max(1, steps // 10) :].mean(1)


def _digits() -> Task:
    data = load_digits()
    images, labels = jnp.float32(data.data / 16), jnp.int32(data.target)

    def init(key: jax.Array) -> Any:
        shapes = (64, 128), (128, 128), (128, 10)
        keys = jax.random.split(key, len(shapes))
        glorot = jax.nn.initializers.glorot_normal()
        pairs = zip(keys, shapes, strict=True)
        return [(glorot(k, shape), jnp.zeros(shape[1])) for k, shape in pairs]

    def examples(key: jax.Array) -> Any:
        picks = jax.random.randint(key, [64], 0, len(images))
        return images[picks], labels[picks]

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        *hidden, (w, b) = params
        for weights, bias in hidden:
            x = jax.nn.gelu(x @ weights + bias[None])
        return _half_models.cross_entropy(x @ w + b[None], y)

    return Task(init, examples, loss, 2000)


def _characters() -> Task:
    text = jnp.asarray(_language.load_text())
    offsets = jnp.arange(_language.CONTEXT + 1)

    def init(key: jax.Array) -> Any:
        return nnx.state(_language.Transformer(nnx.Rngs(key)), nnx.Param)

    def examples(key: jax.Array) -> Any:
        last = len(text) - _language.CONTEXT - 1
        pieces = text[jax.random.randint(key, (4, 1), 0, last) + offsets]
        return pieces[:, :-1], pieces[:, 1:]

    def loss(params: Any, batch: Any) -> jax.Array:
        net = nnx.eval_shape(lambda: _language.Transformer(nnx.Rngs(0)))
        logits = nnx.merge(nnx.graphdef(net), params)(batch[0])
        return _half_models.cross_entropy(logits, batch[1])

    return Task(init, examples, loss, 250)


def _float32(tree: Any) -> Any:
    return jax.tree.map(wide, tree)


def _keeping(start: Any, value: Any, step: Any) -> Callable[[Any, Any], Any]:
    """An optimizer of float32 values that keeps something beside each parameter.

    Args:
      start: what is kept, of a parameter.
      value: what the optimizer sees, of a parameter and what is kept.
      step: the new value and what is kept, of a parameter, what is kept and an update.
    """

    def wrap(inner: Any, key: jax.Array) -> Any:
        del key

        def init(params: Any) -> Any:
            return inner.init(_float32(params)), jax.tree.map(start, params)

        def update(grads: Any, state: Any, params: Any) -> Any:
            inner_state, kept = state
            values = _float32(jax.tree.map(value, params, kept))
            updates, inner_state = inner.update(_float32(grads), inner_state, values)
            made = jax.tree.map(step, params, kept, updates)
            outer = jax.tree.structure(params)
            new, kept = jax.tree.transpose(outer, None, made)
            changes = jax.tree.map(lambda p, q: wide(q) - wide(p), params, new)
            return changes, (inner_state, kept)

        return optax.GradientTransformation(init, update)

    return wrap


def _round(p: jax.Array, kept: jax.Array, update: jax.Array) -> Any:
    return (wide(p) + update).astype(p.dtype), kept


def _copy(p: jax.Array, kept: jax.Array, update: jax.Array) -> Any:
    kept = kept + update
    return kept.astype(p.dtype), kept


def _kahan(p: jax.Array, kept: jax.Array, update: jax.Array) -> Any:
    update = update + wide(kept)
    new = (wide(p) + update).astype(p.dtype)
    return new, (update - (wide(new) - wide(p))).astype(p.dtype)


_nothing = functools.partial(jnp.zeros, (0,))
FORMS = {
    "float32 parameters": Form(lambda inner, _: inner, (4, 0, 8), jnp.float32),
    "naive": Form(lambda inner, _: inner, (2, 0, 4)),
    "naive, float32 moments": Form(
        _keeping(lambda _: _nothing(), lambda p, _: p, _round), (2, 0, 8)
    ),
    "float32 copy": Form(_keeping(wide, lambda _, kept: kept, _copy), (2, 4, 8)),
    "Kahan sum": Form(_keeping(jnp.zeros_like, lambda p, _: p, _kahan), (2, 2, 8)),
    "remainder": Form(lambda inner, _: jmp_scale.with_half_storage(inner), (2, 2, 8)),
    "stochastic": Form(
        lambda inner, key: jmp_scale.with_half_storage(
            inner, remainders=False, key=key
        ),
        (2, 0, 8),
    ),
}
TASKS = {"digits": _digits, "character transformer": _characters}


if __name__ == "__main__":
    main()
