"""Runs that go wrong: what `SpikeGuard` skips of them, and what `HealthLog` says.

Once a release. `--parts guard` trains small tasks with bad batches and other faults,
and counts which steps the guard skips. `--parts health` trains them with symptoms of a
drawn shape and size, and without, asks a `HealthLog` every 50 steps, and counts: of the
runs of which a sentence was said, how many went wrong (precision), and of those that
went wrong, of how many it was said (recall). Whether a run went wrong is read off its
end, or off the same run without the fault, or it is the fault, none of which a log can
know. The rules were tuned on other networks, and on these tasks with the seeds 0 and
100; cases of "loss diverges" were defined after a look at the seeds 200 and 201.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table, add_several, parser, report
from _small_tasks import tasks
from models import cast
from tqdm import tqdm

import jmp_scale
from jmp_scale import diagnostics

CHECK = 50  # steps between two looks at the health of a run
WRONG, WELL, BETWEEN = "wrong", "well", "between"
OPTIMIZERS = {"adam": optax.scale_by_adam, "momentum": lambda: optax.trace(0.9)}


class Setting(NamedTuple):
    """What is done to a run, numbers or f32[steps]; many runs are one compilation."""

    rate: Any = 1e-3
    weight: Any = 1.0  # factor of the loss
    is_swapped: Any = False  # whether targets are those of other examples
    steepness: Any = 1.0  # factor of the gradients
    swelling: Any = 1.0  # factor of the parameters, after the step


class Kind(NamedTuple):
    """What is compiled into a run."""

    task: str
    optimizer: str = "adam"
    parameters: str = "float32"
    is_guarded: bool = False


class Run(NamedTuple):
    """The losses of a run as it saw them, its gradient norms, and what came of it."""

    loss: np.ndarray
    norm: np.ndarray
    is_skipped: np.ndarray
    final: np.ndarray  # loss of fresh examples
    said: frozenset[str]  # by a log at any check
    fault: str = ""  # the finding that its setting is a case of


def main(argv=None):
    arguments = parser(__doc__)
    add_several(arguments, "--parts", PARTS, PARTS, "to run")
    names = list(tasks())
    add_several(arguments, "--tasks", names, names, "to train")
    text = "of each setting; default 3, of health 7, of rounding 2"
    arguments.add_argument("--seeds", type=int, help=text)
    arguments.add_argument("--steps", type=int, default=500, help="a multiple of 50")
    arguments.add_argument("--clean-steps", type=int, default=10_000)
    args = arguments.parse_args(argv)
    if args.steps < 350 or args.steps % CHECK:
        arguments.error(f"expected --steps >= 350 in steps of 50, got {args.steps}")
    report(itertools.chain.from_iterable(PARTS[part](args) for part in args.parts))


def train(kind, settings, seed, steps):
    """One `Run` for each setting, all with the same start and the same batches."""
    columns = zip(*settings, strict=True)
    arrays = [
        np.stack([np.broadcast_to(np.float32(x), [steps]) for x in column])
        for column in columns
    ]
    out = jax.device_get(_compiled(kind, steps)(Setting(*arrays), seed))
    runs = []
    for i in range(len(settings)):
        loss, norm, skipped, states, histories, final = jax.tree.map(
            lambda x: x[i],  # noqa: B023
            out,
        )
        log, said = diagnostics.HealthLog(), frozenset()
        for check in range(steps // CHECK):
            pick = functools.partial(jax.tree.map, lambda x: x[check])  # noqa: B023
            log(pick(states), pick(histories))
            said |= log.rules
        runs.append(Run(loss.ravel(), norm.ravel(), skipped.ravel(), final, said))
    return runs


@functools.cache
def _compiled(kind, steps):
    task = tasks()[kind.task]
    guard = jmp_scale.SpikeGuard() if kind.is_guarded else None
    tx = jmp_scale.with_loss_scale(OPTIMIZERS[kind.optimizer](), guard=guard)

    def one(setting, seed):
        params = task.init(jax.random.key(seed))
        opt_state = tx.init(params)
        params = cast(params, kind.parameters)
        draw, fresh = jax.random.split(jax.random.key(1000 + seed))

        def step(carry, xs):
            params, old, history = carry
            k, now = xs
            x, y = task.examples(jax.random.fold_in(draw, k), task.batch)
            y = jnp.where(now.is_swapped > 0, jnp.roll(y, 1, axis=0), y)

            def loss_fn(params):
                return now.weight * jnp.mean(task.losses(cast(params, "float32"), x, y))

            loss, grads = jax.value_and_grad(loss_fn)(params)
            grads = jax.tree.map(lambda g: g * now.steepness, cast(grads, "float32"))
            updates, new = tx.update(grads, old, params, value=loss)
            updates = jax.tree.map(lambda u: (-now.rate * u).astype(u.dtype), updates)
            norm = diagnostics.metrics(new, grads)["grad_norm"]
            known = {"loss": loss, "grads": grads, "params": params, "updates": updates}
            history = history.push(old, new, **known)
            params = optax.apply_updates(params, updates)
            params = jax.tree.map(lambda p: p * now.swelling.astype(p.dtype), params)
            return (params, new, history), (loss, norm, ~new.applied)

        def chunk(carry, xs):
            carry, seen = jax.lax.scan(step, carry, xs)
            return carry, (*seen, *carry[1:])

        history = diagnostics.LossScaleHistory.create(min(steps, 1000))
        xs = jnp.arange(steps), setting
        chunks = jax.tree.map(lambda x: x.reshape(-1, CHECK), xs)
        carry, seen = jax.lax.scan(chunk, (params, opt_state, history), chunks)
        final = task.losses(cast(carry[0], "float32"), *task.examples(fresh, 2048))
        return *seen, final.mean()

    return jax.jit(jax.vmap(one, (0, None)))


# What a guard skips.


def faults(steps):
    """(weights f32[steps], bad bool[steps]) of each fault, by name.

    The weights multiply the losses; a bad step has the targets of other examples, too.
    """
    at = steps // 2 - 50

    def at_steps(changes):
        weights = np.ones(steps, np.float32)
        weights[list(changes)] = list(changes.values())
        return weights, np.isin(np.arange(steps), list(changes))

    after, none = np.arange(steps), np.zeros(steps, bool)
    several = {at: 1e6, at + 3: 1e3, at + 20: 300}
    several |= {at + 21: 1e3, at + 22: 1e3, at + 70: 100}
    return {
        "one spike": at_steps({at: 1e3}),
        "spike after spike": at_steps(several),
        "weights of 3": at_steps({at: 3.0, at + 30: 3.0, at + 60: 3.0}),
        "NaN in the warm-up": at_steps({30: np.nan}),
        "NaN later": at_steps({at: np.nan}),
        "level shift": (np.where(after < at, 1.0, 10.0), none),
        "slow growth": (2.0 ** (after / 150), none),
    }


def guard_tables(args):
    """Worst final losses of all seeds over those of clean runs, and what is skipped."""
    cases, seeds = faults(args.steps), args.seeds or 3
    losses = Table("Worst final loss under the guard", ["task", *cases])
    skips = Table("Bad batches skipped + good, in all seeds", ["task", *cases])
    clean = Table("Steps skipped without a fault", ["task", "steps", "skipped"])
    for name in tqdm(args.tasks, "guard"):
        kind = Kind(name, is_guarded=True)
        given = [(1.0, False), *cases.values()]
        ratios, counts = [], []
        for seed in range(seeds):
            settings = [
                Setting(cosine(name, args.steps), weight, bad & (weight != 1))
                for weight, bad in given
            ]
            first, *runs = train(kind, settings, seed, args.steps)
            ratios.append([run.final / first.final for run in runs])
            skipped = np.stack([run.is_skipped for run in runs])
            bad = np.stack([bad for _, bad in cases.values()])
            parts = skipped & bad, bad, skipped & ~bad
            counts.append([part.sum(1) for part in parts])
        losses.rows.append([name, *(f"{x:.2f}" for x in np.max(ratios, 0))])
        sums = np.sum(counts, 0).T
        skips.rows.append([name, *(f"{a} of {b} + {c}" for a, b, c in sums)])
        settings = [Setting(cosine(name, args.clean_steps))]
        runs = [train(kind, settings, s, args.clean_steps)[0] for s in range(seeds)]
        total = sum(int(run.is_skipped.sum()) for run in runs)
        clean.rows.append([name, f"{seeds} x {args.clean_steps:,}", total])
    return [losses, skips, clean]


def cosine(name, steps):
    schedule = optax.cosine_decay_schedule(tasks()[name].learning_rate, steps, 0.01)
    return np.asarray(schedule(np.arange(steps)))


# What a log says.


def learning_rates(task, seed, steps):
    """Too large a learning rate: less than half of the best run's fall in loss."""
    outcomes = []
    for name, rates in {
        "adam": (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
        "momentum": (0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 100.0, 1000.0),
    }.items():
        runs = train(Kind(task, name), [Setting(rate) for rate in rates], seed, steps)
        best = min(end(run) for run in runs)
        outcomes += [(judged(run, best), run) for run in runs]
    return outcomes


def growth(task, seed, steps):
    """A loss or parameters that grow by a factor in each step after a fifth."""
    later = np.maximum(np.arange(steps) - steps // 5, 0)
    settings = [Setting(3e-3, 2.0 ** (x * later)) for x in (0.0, 0.01, 0.02, 0.04)]
    settings += [
        Setting(3e-3, swelling=1 + x * (later > 0)) for x in (0.002, 0.005, 0.01, 0.02)
    ]
    runs = train(Kind(task), settings, seed, steps)
    return [(judged(run, end(runs[0])), run) for run in runs]


def unsteady(task, seed, steps):
    """Healthy runs, and symptoms of a drawn shape, size and period on top of them.

    Every second seed runs for twice as many steps.
    """
    draw, steps = np.random.default_rng(seed), steps * (1 + seed % 2)
    k = np.arange(steps)

    def swings():
        size, wave = draw.uniform(0.5, 0.8), _WAVES[draw.integers(len(_WAVES))]
        drift = draw.choice([1e-3, draw.uniform(-0.7, 0.7)])  # log of the last period's
        turns = -np.expm1(-drift * k / steps) / drift * steps / draw.uniform(12, 50)
        return Setting(weight=1 + size * wave(turns))

    def burst():
        size, width, period = draw.uniform(4, 10), *draw.integers((1, 12), (3, 33))
        return Setting(weight=np.where((k - 1) % period < width, size, 1))

    faults = {
        "": [Setting(rate) for rate in (1e-3, 2e-3, 3e-3)],
        "loss oscillates": [swings() for _ in range(3)],
        "bursts": [burst() for _ in range(3)],
        "growing norm": [
            Setting(steepness=2.0 ** (k / steps * draw.uniform(11, 17)))
            for _ in range(3)
        ],
        "no progress": [Setting(rate) for rate in (0.0, 1e-9, 1e-7)],
    }
    names = [name for name, settings in faults.items() for _ in settings]
    runs = train(Kind(task), [*itertools.chain(*faults.values())], seed, steps)
    pairs = zip(names, runs, strict=True)
    return [(WRONG if name else WELL, run._replace(fault=name)) for name, run in pairs]


def rounding(task, seed, steps):
    """Parameters of few digits: a tenth of what float32 gains is lost."""
    outcomes = []
    for name, rates in {
        "adam": (1e-5, 1e-4, 3e-4, 3e-3),
        "momentum": (3e-4, 3e-3, 0.03, 0.1),
    }.items():
        settings = [Setting(rate) for rate in rates]
        slow = [Setting(1e-6 * rate) for rate in rates]
        runs = train(Kind(task, name), [*settings, *slow], seed, steps)
        twins, slow_runs = runs[: len(rates)], runs[len(rates) :]
        outcomes += [(WELL, run) for run in twins]
        outcomes += [(WRONG, run) for run in slow_runs]
        for dtype in ("bfloat16", "float16"):
            runs = train(Kind(task, name, dtype), settings, seed, steps)
            for twin, run in zip(twins, runs, strict=True):
                gained = max(twin.loss[0] - end(twin), 1e-3)
                missing = (end(run) - end(twin)) / gained
                kind = WRONG if missing >= 0.1 else WELL if missing < 0.03 else BETWEEN
                outcomes.append((kind, run))
    return outcomes


# Waves from -1 to 1 of a number of turns: sine, square, rising and falling saw, and a
# square that is above its mean in a third of the time.
_WAVES = (
    lambda turns: np.sin(2 * np.pi * turns),
    lambda turns: np.where(turns % 1 < 1 / 2, 1.0, -1.0),
    lambda turns: 2 * (turns % 1) - 1,
    lambda turns: 1 - 2 * (turns % 1),
    lambda turns: np.where(turns % 1 < 1 / 3, 1.0, -1.0),
)
# Each experiment, and the findings that it is to bring out.
EXPERIMENTS = {
    learning_rates: ("loss diverges", "no progress"),
    growth: ("loss diverges",),
    unsteady: ("loss oscillates", "bursts", "growing norm", "no progress"),
    rounding: ("lost updates",),
}


def end(run):
    """The mean loss of the last tenth, infinite if one is not finite."""
    last = run.loss[-len(run.loss) // 10 :]
    return float(last.mean()) if np.isfinite(last).all() else np.inf


def judged(run, best):
    """By the share of the possible fall in loss that the run has at its end."""
    share = (run.loss[0] - end(run)) / max(run.loss[0] - best, 1e-6)
    return WELL if share >= 0.75 else WRONG if share < 0.5 else BETWEEN


def cases(run):
    """The findings of which a run that went wrong is a case, by all of its numbers."""
    if run.fault:
        return {run.fault}
    first, last = run.loss[0], end(run)
    lowest = np.nanmin(run.loss.reshape(-1, CHECK).mean(1))
    late_norm = np.nanmean(run.norm[-len(run.norm) // 10 :])
    are = {
        "loss diverges": last - lowest > max(first - lowest, abs(lowest)) / 2,
        "no progress": np.nanmax(run.loss) > 3 * first
        or late_norm < 1e-3 * run.norm[0],
    }
    return {kind for kind, is_case in are.items() if is_case}


def health_tables(args):
    """Counts of runs that went wrong and of others, and of those that are told."""
    columns = ["runs", "finding", "went wrong", "well", "between"]
    columns += ["said of wrong", "of well", "of between", "precision", "recall"]
    result = Table("Findings of HealthLog on runs that go wrong and on others", columns)
    for make, expected in EXPERIMENTS.items():
        count = args.seeds or (2 if make is rounding else 7)
        rounds = list(itertools.product(args.tasks, range(200, 200 + count)))
        title = make.__name__.replace("_", " ")
        outcomes = [make(*each, args.steps) for each in tqdm(rounds, title)]
        judged_runs = list(itertools.chain(*outcomes))
        others = {rule for _, run in judged_runs for rule in run.said} - {*expected}
        for rule in expected if len(expected) > 1 else ():
            result.rows.append([title, rule, *scores(judged_runs, {rule}, rule)])
        any_rule = expected[0] if len(expected) == 1 else "any of these"
        result.rows.append([title, any_rule, *scores(judged_runs, {*expected})])
        for rule in sorted(others):
            result.rows.append([title, f"({rule})", *scores(judged_runs, {rule})])
    return [result]


def scores(judged_runs, wanted, rule=None):
    """The counts of a row: runs, those of which a finding was made, and the shares."""
    counts = {kind: [0, 0] for kind in (WRONG, WELL, BETWEEN)}
    missed = wrong = 0
    for outcome, run in judged_runs:
        is_said = not wanted.isdisjoint(run.said)
        counts[outcome][0] += 1
        counts[outcome][1] += is_said
        if outcome == WRONG and (rule is None or rule in cases(run)):
            wrong += 1
            missed += not is_said
    (_, hits), (well, false), (between, unclear) = counts.values()
    precision = f"{hits / (hits + false):.2f}" if hits + false else "-"
    recall = f"{1 - missed / wrong:.2f}" if wrong else "-"
    return [wrong, well, between, hits, false, unclear, precision, recall]


PARTS = {"guard": guard_tables, "health": health_tables}

if __name__ == "__main__":
    main()
