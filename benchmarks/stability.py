"""What a bad batch does to a run, and what each rule against spikes makes of it.

Four small tasks are trained with Adam and a cosine schedule, under every rule and with
every fault. The tables give the worst final loss over that of the run without a fault,
how many bad and good batches were skipped, and how many steps are in long runs without
a fault. What others do is written from their descriptions, around Adam.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table, parser, report
from _stability_tasks import Task, tasks
from tqdm import tqdm

import jmp_scale

WINDOW, SIGMAS = 128, 6.0  # the defaults of MaxText

SHARDS = 2
GOAL = 1.15  # final loss over that without a fault
CLEAN = "no fault"


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3, help="runs of each cell")
    arguments.add_argument("--steps", type=int, default=600, help="of a faulty run")
    text = "of a run without a fault"
    arguments.add_argument("--clean-steps", type=int, default=10_000, help=text)
    arguments.add_argument("--tasks", nargs="+", default=list(tasks()))
    arguments.add_argument("--rules", nargs="+", default=list(RULES))
    args = arguments.parse_args(argv)
    report([*fault_tables(args), clean_table(args)])


def faults(steps):
    """(weights f32[steps, SHARDS], bad bool[steps]) of each fault, by name.

    The weights multiply the losses of a step's examples. A bad step has the targets of
    other examples, too, in each shard whose weight is not 1.
    """
    at = steps // 2 - 50

    def weights(changes, shards=slice(None)):
        result = np.ones([steps, SHARDS], np.float32)
        for step, weight in changes.items():
            result[step, shards] = weight
        return result, np.isin(np.arange(steps), list(changes))

    shift, growth = np.ones([2, steps, SHARDS], np.float32)
    shift[at:] = 10
    growth *= 2 ** (np.arange(steps, dtype=np.float32)[:, None] / 150)
    none = np.zeros(steps, bool)
    one_after_another = {at: 1e6, at + 3: 1e3, at + 20: 300}
    one_after_another |= {at + 21: 1e3, at + 22: 1e3, at + 70: 100}
    return {
        CLEAN: weights({}),
        "one spike": weights({at: 1e3}),
        "spike after spike": weights(one_after_another),
        "NaN in the warm-up": weights({30: np.nan}),
        "NaN later": weights({at: np.nan}),
        "level shift": (shift, none),
        "slow growth": (growth, none),
        "a bad shard": weights({at: 1e3, at + 10: np.nan}, slice(0, 1)),
    }


def run(task: Task, rule, weights, bad, seeds):
    """(final losses f32[seeds], skips bool[seeds, steps]), data-parallel over shards.

    A loss is NaN if the shards' parameters end up different.
    """
    return jax.device_get(_trainer(task, rule, seeds)(weights, bad))


@functools.cache
def _trainer(task, rule, seeds):
    def train(seed, weights, bad):
        keys = jax.random.split(jax.random.key(seed), 3)
        steps, shards = weights.shape
        schedule = _schedule(task, steps)
        tx = rule(schedule, "shard") if rule is guard else rule(schedule)

        def step(carry, xs):
            key, w, is_bad = xs
            batch = _faulty(task.examples(key, task.batch), w, is_bad)
            step_of_a_shard = functools.partial(_step_of_a_shard, task, tx, rule)
            return jax.vmap(step_of_a_shard, axis_name="shard")(carry, *batch)

        params = task.init(keys[0])
        start = params, tx.init(params)
        start = jax.tree.map(lambda a: jnp.stack([jnp.asarray(a)] * shards), start)
        xs = (jax.random.split(keys[1], steps), weights, bad)
        (params, _), skipped = jax.lax.scan(step, start, xs)
        equal = [(p == p[:1]).all() for p in jax.tree.leaves(params)]
        params = jax.tree.map(lambda p: p[0], params)
        x, y = task.examples(keys[2], 2048)
        loss = task.losses(params, x, y).mean()
        return jnp.where(jnp.stack(equal).all(), loss, jnp.nan), skipped[:, 0]

    of_seeds = jax.jit(jax.vmap(train, (0, None, None)))
    return functools.partial(of_seeds, jnp.arange(seeds))


def _schedule(task, steps):
    return optax.cosine_decay_schedule(task.learning_rate, steps, 0.01)


def _faulty(examples, w, is_bad):
    """(inputs, targets, weight) of each shard."""
    x, y = (a.reshape(len(w), -1, *a.shape[1:]) for a in examples)
    swapped = is_bad & (w != 1).reshape(-1, *[1] * (y.ndim - 1))
    return x, jnp.where(swapped, jnp.roll(y, 1, axis=1), y), w


def _step_of_a_shard(task, tx, rule, carry, x, y, w):
    params, state = carry
    value_and_grad = jax.value_and_grad(lambda p: jnp.mean(w * task.losses(p, x, y)))
    loss, grads = value_and_grad(params)
    grads = jax.lax.pmean(grads, "shard")
    if rule is not guard:  # which agrees over the shards' own losses
        loss = jax.lax.pmean(loss, "shard")
    updates, state = tx.update(grads, state, params, value=loss)
    # So no rule has to be asked: Adam's update is never 0 everywhere.
    skipped = jnp.stack([(u == 0).all() for u in jax.tree.leaves(updates)]).all()
    return (optax.apply_updates(params, updates), state), skipped


def fault_tables(args):
    """Worst final losses of all tasks and seeds, and skips of all."""
    names = [fault for fault in faults(args.steps) if fault != CLEAN]
    losses = Table("Worst final loss of all tasks and seeds", ["rule", *names])
    skips = Table("Bad batches skipped + good, in all runs", ["rule", *names])
    cases, given = faults(args.steps), (args.rules, names, args.tasks)
    cells = {}
    for rule, fault, name in tqdm([*itertools.product(*given)], desc="faults"):
        weights, bad = cases[fault]
        task, runs = tasks()[name], args.seeds
        clean = run(task, RULES["nothing"], *cases[CLEAN], runs)[0]
        ends, skipped = run(task, RULES[rule], weights, bad, runs)
        counts = skipped[:, bad].sum(), bad.sum() * runs, skipped[:, ~bad].sum()
        cells.setdefault((rule, fault), []).append((worst_ratio(ends, clean), counts))
    for rule in args.rules:
        columns = [zip(*cells[rule, fault], strict=True) for fault in names]
        ratios, counts = zip(*columns, strict=True)
        losses.rows.append([rule, *(ratio_text(max(x)) for x in ratios)])
        sums = [np.sum(x, axis=0) for x in counts]
        skips.rows.append([rule, *(f"{a} of {b} + {c}" for a, b, c in sums)])
    return [losses, skips]


def worst_ratio(losses, clean):
    """Largest ratio of the seeds; infinite for a NaN.

    A loss that may be negative has no ratio: where that of a seed is, the increases
    count in units of 1.
    """
    ratios = 1 + (losses - clean) / (clean if (clean > 0).all() else 1.0)
    return float(np.where(np.isnan(ratios), np.inf, ratios).max())


def ratio_text(ratio):
    text = f"{ratio:.2f}" if ratio < 100 else "lost"
    return f"**{text}**" if ratio > GOAL else text


def clean_table(args):
    """Steps that the rules would skip in long runs without a fault."""
    rules = {"the window's rule": skips_of_window, "SpikeGuard": skips_of_guard}
    columns = ["task", "compute dtype", "steps", *rules]
    table = Table("Steps skipped without a fault, in all seeds", columns)
    kinds = [(name, dtype) for name in args.tasks for dtype in ("float32", "bfloat16")]
    for name, dtype in tqdm(kinds, desc="clean runs"):
        losses, norms = clean_run(tasks()[name], dtype, args.clean_steps, args.seeds)
        counts = [jax.jit(jax.vmap(f))(losses, norms).sum() for f in rules.values()]
        steps = f"{args.seeds} x {args.clean_steps:,}"
        table.rows.append([name, dtype, steps, *map(int, counts)])
    return table


def clean_run(task, dtype, steps, seeds):
    """(losses, gradient norms) of each step, f32[seeds, steps], without a rule."""

    def train(seed):
        keys = jax.random.split(jax.random.key(seed), 2)
        tx = optax.adam(_schedule(task, steps))

        def loss_fn(params, x, y):
            params = jax.tree.map(lambda p: p.astype(dtype), params)
            return task.losses(params, x, y).mean()

        def step(carry, key):
            params, state = carry
            x, y = task.examples(key, task.batch)
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            updates, state = tx.update(grads, state)
            carry = optax.apply_updates(params, updates), state
            return carry, (loss, optax.tree.norm(grads))

        params = task.init(keys[0])
        step_keys = jax.random.split(keys[1], steps)
        return jax.lax.scan(step, (params, tx.init(params)), step_keys)[1]

    return jax.jit(jax.vmap(train))(jnp.arange(seeds))


class Window(NamedTuple):
    """The last `WINDOW` losses and gradient norms, and how many there have been."""

    seen: jax.Array  # f32[2, WINDOW]
    steps: jax.Array  # i32[]


class WindowState(NamedTuple):
    window: Window
    inner_state: Any


def guard(schedule, axis_name=None):
    return jmp_scale.with_loss_scale(
        optax.adam(schedule), axis_name=axis_name, guard=jmp_scale.SpikeGuard()
    )


def nothing(schedule):
    return optax.with_extra_args_support(optax.adam(schedule))


def clipping(schedule):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    return optax.with_extra_args_support(tx)


def apply_if_finite(schedule):
    return optax.with_extra_args_support(
        optax.apply_if_finite(optax.adam(schedule), max_consecutive_errors=5)
    )


def maxtext(schedule):
    """Leaves out a step whose loss or norm exceeds mean + 6 deviations of the window.

    Every loss and norm enters the window, those of skipped steps too. The first 63
    steps are always taken.
    """
    inner = optax.adam(schedule)

    def init(params):
        return WindowState(_empty_window(), inner.init(params))

    def update(updates, state, params=None, *, value):
        within, window = _judged(state.window, value, optax.tree.norm(updates))
        updates, inner_state = jax.lax.cond(
            within,
            lambda: inner.update(updates, state.inner_state, params),
            lambda: (jax.tree.map(jnp.zeros_like, updates), state.inner_state),
        )
        return updates, WindowState(window, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def skips_of_window(losses, norms):
    """Whether the rule of the window leaves out each step of a run, bool[steps]."""

    def step(window, seen):
        within, window = _judged(window, *seen)
        return window, ~within

    return jax.lax.scan(step, _empty_window(), (losses, norms))[1]


def skips_of_guard(losses, norms):
    """Whether `SpikeGuard` does."""

    def step(guard, seen):
        spike, guard = guard.judge(*seen, finite=jnp.array(True))
        return guard, spike

    return jax.lax.scan(step, jmp_scale.SpikeGuard(), (losses, norms))[1]


def _empty_window():
    return Window(jnp.zeros([2, WINDOW]), jnp.zeros([], jnp.int32))


def _judged(window, loss, norm):
    """(whether a step is taken, the window with it); a NaN is within no limit."""
    x = jnp.stack([loss, norm])
    known = (jnp.arange(WINDOW) < window.steps)[None]
    n = jnp.clip(window.steps, 1, WINDOW)
    mean = jnp.sum(jnp.where(known, window.seen, 0), axis=1) / n
    squares = jnp.where(known, (window.seen - mean[:, None]) ** 2, 0)
    deviation = jnp.sqrt(jnp.sum(squares, axis=1) / jnp.maximum(n - 1, 1))
    within = jnp.all(x - mean <= SIGMAS * deviation)
    seen = window.seen.at[:, window.steps % WINDOW].set(x)
    is_warmup = window.steps + 1 < WINDOW // 2
    return within | is_warmup, Window(seen, window.steps + 1)


RULES = {
    "nothing": nothing,
    "clip_by_global_norm(1)": clipping,
    "optax.apply_if_finite": apply_if_finite,
    "MaxText's rule": maxtext,
    "SpikeGuard": guard,
}


if __name__ == "__main__":
    main()
