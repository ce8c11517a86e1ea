"""How optimizers train with parameters or averages in bfloat16, and what AdamW costs.

`--parts parameters` trains a classifier of digits and the character transformer of the
examples with AdamW, under `autocast` to bfloat16, by how the parameters are stored. "as
float32" is said where the spread over the seeds overlaps that of float32 parameters.
`--parts averages` trains the digits classifier in float32, so that nothing but the
averages differs: in float32, rounded to nearest after each step, or stochastically.
`--parts cost` compiles AdamW for GPUs and TPUs that are not there, on the parameters of
a transformer of one layer. See the README of this folder for what to install.

Starts and batches are the same in every form, and the learning rate ends at 0 (cosine).
A loss is the mean over the last tenth of the steps.
"""

import functools
import operator
import pathlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table
from _small_tasks import dense, spread_beside, tasks
from compilers import AS_WRITTEN, Figures, figures, targets
from flax import nnx
from jax import lax
from models import Transformer, cast, cross_entropy, transformer
from tqdm import tqdm

import jmp_scale
from jmp_scale import with_half_storage

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import _language

contrib: Any = optax.contrib
POINTS = 25  # of a curve
Losses = dict[str, np.ndarray]  # f32[seeds, steps] of each form


class Task(NamedTuple):
    """Something to train: parameters of a key, batches of a key, a float32 loss."""

    init: Callable[[jax.Array], Any]
    examples: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    steps: int


class Form(NamedTuple):
    """How a training stores things: an optimizer, of a learning rate and a key."""

    make: Callable[[Any, jax.Array], optax.GradientTransformation]
    dtype: Any = jnp.float32  # of the parameters


class Row(NamedTuple):
    """An optimizer of a learning rate's schedule, and its averages."""

    make: Callable[[optax.Schedule], optax.GradientTransformation]
    averages: Collection[str] = ("mu", "nu")
    rates: Sequence[str] = ("1e-3",)


def times(factor: float, schedule: optax.Schedule) -> optax.Schedule:
    return lambda count: factor * schedule(count)


FORMS = {
    "float32 parameters": Form(lambda rate, _: optax.adamw(rate)),
    "naive": Form(lambda rate, _: optax.adamw(rate), jnp.bfloat16),
    "remainder": Form(
        lambda rate, _: with_half_storage(optax.adamw(rate)), jnp.bfloat16
    ),
    "stochastic": Form(
        lambda rate, key: with_half_storage(
            optax.adamw(rate), remainders=False, key=key
        ),
        jnp.bfloat16,
    ),
}
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


def forms_of(row: Row) -> dict[str, Form]:
    """How the averages of an optimizer are stored."""

    def stochastic(rate: optax.Schedule, key: jax.Array) -> Any:
        return with_half_storage(row.make(rate), averages=row.averages, key=key)

    return {
        "float32": Form(lambda rate, _: row.make(rate)),
        "to nearest": Form(lambda rate, _: nearest(row.make(rate), row.averages)),
        "stochastic": Form(stochastic),
    }


def nearest(
    inner: optax.GradientTransformation, averages: Collection[str]
) -> optax.GradientTransformation:
    """The averages that `with_half_storage` rounds, cast to bfloat16 and back."""
    stored = with_half_storage(inner, averages=averages, key=jax.random.key(0))

    def init(params: Any) -> Any:
        like = jax.eval_shape(stored.init, params).inner_state
        return optax.tree.cast_like(inner.init(params), like)

    def update(updates: Any, state: Any, params: Any) -> Any:
        wide = jax.eval_shape(inner.init, params)
        wide = optax.tree.cast_like(state, wide)
        updates, new = inner.update(updates, wide, params)
        return updates, optax.tree.cast_like(new, state)

    return optax.GradientTransformation(init, update)  # pyright: ignore


BOTH = {"averages": ("mu", "nu")}
COSTS = {
    "float32": FORMS["float32 parameters"],
    "float32, mu_dtype": Form(lambda rate, _: optax.adamw(rate, mu_dtype=jnp.bfloat16)),
    "float32, half states": forms_of(ROWS["AdamW, b2 .999"])["stochastic"],
    "remainder": FORMS["remainder"],
    "remainder, half states": Form(
        lambda rate, key: with_half_storage(optax.adamw(rate), **BOTH, key=key),
        jnp.bfloat16,
    ),
    "stochastic": FORMS["stochastic"],
    "stochastic, half states": Form(
        lambda rate, key: with_half_storage(
            optax.adamw(rate), **BOTH, remainders=False, key=key
        ),
        jnp.bfloat16,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    _harness.round_as_written()
    parser = _harness.parser(__doc__)
    for flag, choices in (
        ("--parts", ("parameters", "averages", "cost")),
        ("--tasks", TASKS),
        ("--optimizers", ROWS),
    ):
        _harness.add_several(parser, flag, choices, choices, "to run")
    rates, text = ["1e-3", "1e-4", "1e-5"], "peaks of AdamW's learning rate"
    parser.add_argument("--rates", nargs="+", default=rates, help=text)
    parser.add_argument("--seeds", type=int, default=5, help="of each form")
    parser.add_argument("--steps", type=int, help="default: those of the task")
    args = parser.parse_args(argv)
    tables = []
    if "parameters" in args.parts:
        tables += parameters(args)
    if "averages" in args.parts:
        tables += averages(args)
    if "cost" in args.parts:
        tables += costs()
    _harness.report(tables)


def parameters(args: Any) -> Iterator[Table]:
    """Losses of each task and rate by how the parameters are stored, and curves."""
    for name in args.tasks:
        task = TASKS[name]()
        task = task._replace(
            loss=jmp_scale.autocast(task.loss, "bfloat16"),
            steps=args.steps or task.steps,
        )
        for rate, losses in train_all(task, FORMS, args.rates, args.seeds).items():
            title = f"{name}, learning rate {rate}"
            yield from (results(title, losses), curves(title, losses))


def averages(args: Any) -> Iterator[Table]:
    """Losses of each optimizer by how its averages are stored, and curves."""
    task = _digits()
    task = task._replace(steps=args.steps or task.steps)
    forms = ["float32", "to nearest", "stochastic"]
    columns = ["optimizer", "rate", *forms, *(f"change, {x}" for x in forms[1:])]
    table = Table("Last training loss", columns)
    found = [table]
    for name in tqdm(args.optimizers, "optimizers"):
        row = ROWS[name]
        trained = train_all(task, forms_of(row), row.rates, args.seeds)
        for rate, losses in trained.items():
            table.rows.append([name, rate, *changes(losses)])
            found.append(curves(f"{name}, learning rate {rate}", losses))
    yield from found


def costs() -> Iterator[Table]:
    """What an update with AdamW costs, in bytes a parameter, as compiled."""
    init = transformer(Transformer(layers=1, vocabulary=8192)).init
    shapes, _ = jax.eval_shape(init, jax.random.key(0))
    count = sum(array.size for array in jax.tree.leaves(shapes))
    columns = ["parameters", "bytes", "temporaries", "M cycles", "kernels"]
    for name in ("h100", "tpu-v5e"):
        if reason := targets.missing(name):
            print(f"{name}: {reason}")
            continue
        table = Table(f"AdamW, {name}", columns)
        for form, how in COSTS.items():
            found = cost(targets.Target(name), shapes, how)
            size = f"{found.bytes_accessed / count:.2f}"
            temporaries = f"{found.temporaries / count:.3f}"
            cycles = f"{found.cycles / 1e6:.2f}" if found.cycles else "-"
            table.rows.append([form, size, temporaries, cycles, found.kernels])
        yield table


def cost(target: targets.Target, shapes: Any, form: Form) -> Figures:
    """Of an update, to which parameters and state are donated."""
    tx = form.make(1e-3, jax.random.key(0))

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.eval_shape(lambda tree: cast(tree, form.dtype), shapes)
    state = jax.eval_shape(tx.init, params)
    arguments = map(target.replicated, (params, state, params))
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments)
    return figures(lowered.compile(compiler_options=AS_WRITTEN), target)


def train_all(
    task: Task, forms: dict[str, Form], rates: Sequence[str], seeds: int
) -> dict[str, Losses]:
    """Training losses by learning rate and form."""
    key = jax.random.key(0)
    starts = jax.jit(jax.vmap(task.init))(jax.random.split(key, seeds))
    batch_keys = jax.random.split(jax.random.fold_in(key, 1), (seeds, task.steps))
    batches = jax.jit(jax.vmap(jax.vmap(task.examples)))(batch_keys)
    losses: dict[str, Losses] = {rate: {} for rate in rates}
    for name, form in forms.items():
        run = jax.jit(trainer(task, form))
        for rate in tqdm(rates, name, leave=False):
            runs = []
            for seed in range(seeds):  # faster than vmap on a CPU
                own = jax.tree.map(operator.itemgetter(seed), (starts, batches))
                runs.append(run(*own, jax.random.key(seed), float(rate)))
            losses[rate][name] = np.stack(runs)
    return losses


def trainer(task: Task, form: Form) -> Callable[..., jax.Array]:
    """A training: losses f32[steps] of float32 parameters, batches, a key and a rate.

    The learning rate is an argument, so that one compilation serves all.
    """

    def run(params: Any, batches: Any, key: jax.Array, rate: Any) -> jax.Array:
        cosine = optax.cosine_decay_schedule(1.0, task.steps)
        tx = form.make(lambda count: rate * cosine(count), key)
        params = jax.tree.map(lambda p: p.astype(form.dtype), params)

        def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, state = carry
            loss, grads = jax.value_and_grad(task.loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        # Strongly typed, as the carry of a scan has to be.
        state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), tx.init(params))
        return lax.scan(step, (params, state), batches)[1]

    return run


def results(title: str, losses: Losses) -> Table:
    """The last losses of each form."""
    table = Table(title, ["form", "median", "least", "largest", "verdict"])
    reference = last_tenth(next(iter(losses.values())))
    for name, of_form in losses.items():
        last = last_tenth(of_form)
        table.rows.append([name, *spread_beside(last, reference)])
    return table


def changes(losses: Losses) -> list[str]:
    """Medians over the seeds; mean changes over float32, with the least and largest."""
    last = {form: last_tenth(x) for form, x in losses.items()}
    cells = [f"{np.median(of_form):.3g}" for of_form in last.values()]
    for form in [*last][1:]:
        change = 100 * (last[form] / last["float32"] - 1)
        numbers = change.mean(), change.min(), change.max()
        mean, low, high = (f"{round(float(x), 1) + 0:+}" for x in numbers)  # no -0.0
        cells.append(f"{mean} % ({low} to {high})")
    return cells


def curves(title: str, losses: Losses) -> Table:
    """Losses over the steps: medians over the seeds, of means over pieces."""
    table = Table(f"{title}, by step", ["step", *losses])
    steps = next(iter(losses.values())).shape[1]
    for piece in np.array_split(np.arange(steps), min(POINTS, steps)):
        means = (np.median(x[:, piece].mean(1)) for x in losses.values())
        table.rows.append([int(piece[-1]) + 1, *(f"{x:.3g}" for x in means)])
    return table


def last_tenth(losses: np.ndarray) -> np.ndarray:
    steps = losses.shape[1]
    return losses[:, steps - max(1, steps // 10) :].mean(1)


def _digits() -> Task:
    digits = tasks()["classifier"]

    def examples(key: jax.Array) -> Any:
        return digits.examples(key, digits.batch)

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        *hidden, (w, b) = params
        for weights, bias in hidden:
            x = jax.nn.gelu(x @ weights + bias[None])
        return cross_entropy(x @ w + b[None], y)

    return Task(dense((64, 128, 128, 10)), examples, loss, 2000)


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
        return cross_entropy(logits, batch[1])

    return Task(init, examples, loss, 250)


TASKS = {"digits": _digits, "character transformer": _characters}


if __name__ == "__main__":
    main()
