"""What a bad batch does to a run, and what each rule against spikes makes of it.

Four small tasks are trained with Adam and a cosine schedule, under every rule and with
every fault. The tables give the final loss over that of the run without a fault, and
how many bad and good batches were skipped. The last table counts the steps that are
skipped in long runs without a fault.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table, parser, report
from _stability_rules import RULES, guard, skips_of_guard, skips_of_window
from _stability_tasks import tasks
from tqdm import tqdm

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
    report([*fault_tables(args), clean_table(args)], args.json)


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


def run(task, rule, weights, bad, seeds):
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
    """Worst final losses of all tasks, and losses and skips of each."""
    names = [fault for fault in faults(args.steps) if fault != CLEAN]
    summary = Table("Worst final loss of all tasks and seeds", ["rule", *names])
    tables, worst = [], {}
    rounds = len(args.tasks) * (1 + len(args.rules) * len(names))
    with tqdm(total=rounds, desc="faults") as progress:
        for task in args.tasks:
            clean, outcomes = _outcomes(task, args, progress)
            losses = Table(f"{task}: final loss over that without", ["rule", *names])
            skips = Table(f"{task}: bad batches skipped + good", ["rule", *names])
            for rule in args.rules:
                cells = [outcomes[rule, fault] for fault in names]
                ratios = [worst_ratio(loss, clean) for loss, *_ in cells]
                worst.setdefault(rule, []).append(ratios)
                losses.rows.append([rule, *map(ratio_text, ratios)])
                skips.rows.append([rule, *(skips_text(*c[1:]) for c in cells)])
            without = ", ".join(f"{x:.4f}" for x in clean)
            losses.notes.append(f"Without a fault: {without} (seeds).")
            tables += [losses, skips]
    for rule, ratios in worst.items():
        summary.rows.append([rule, *map(ratio_text, np.max(ratios, axis=0))])
    return [summary, *tables]


def _outcomes(name, args, progress):
    """Clean final losses, and (losses, skips, bad) of each (rule, fault)."""
    task, cases = tasks()[name], faults(args.steps)
    clean = run(task, RULES["nothing"], *cases[CLEAN], args.seeds)
    progress.update()
    outcomes = {}
    for rule, fault in itertools.product(args.rules, list(cases)[1:]):
        weights, bad = cases[fault]
        result = run(task, RULES[rule], weights, bad, args.seeds)
        outcomes[rule, fault] = (*result, bad)
        progress.update()
    return clean[0], outcomes


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


def skips_text(skips, bad):
    caught, good = skips[:, bad].sum(), skips[:, ~bad].sum()
    return f"{caught} of {bad.sum() * len(skips)} + {good}"


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


if __name__ == "__main__":
    main()
