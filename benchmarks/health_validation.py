"""How often each sentence of `diagnostics.HealthLog` on finite runs is right.

Trains small tasks that go wrong in known ways, and the same tasks when they do not,
asks a `HealthLog` every 50 steps, and counts: of the runs of which a sentence was said,
how many went wrong (precision), and of how many that went wrong it was said (recall).
Whether a run went wrong is read off its end, or off the same run without the fault, or
it is the fault itself, none of which a log can know.

The rules were tuned on other networks, on synthetic losses and on these tasks with the
seeds 0 and 100. Cases of "loss diverges" were defined after a look at the first two of
the default seeds.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Table, parser, report
from _stability_tasks import tasks
from models import cast
from tqdm import tqdm

import jmp_scale
from jmp_scale import diagnostics

CHECK = 50  # steps between two looks at the health of a run
TASKS = ("autoencoder", "classifier", "char-LM")
WRONG, WELL, BETWEEN = "wrong", "well", "between"


class Setting(NamedTuple):
    """What is done to a run, as numbers, so that many runs are one compilation."""

    learning_rate: float = 1e-3  # constant
    growth: float = 0.0  # doublings of the loss in each step after the first fifth
    swelling: float = 0.0  # of the parameters, likewise: a decay of the wrong sign
    swing: float = 0.0  # of the loss: it is multiplied by 1 + swing * wave
    shape: float = 0.0  # of the wave, an index of `_WAVES`
    drift: float = 1e-3  # log of what the period is multiplied by over the run
    burst: float = 1.0  # factor of the loss in `width` steps of every `period`
    width: float = 1.0  # steps
    period: float = 25.0  # steps
    steepening: float = 0.0  # doublings of the gradients in each step


class Optimizer(NamedTuple):
    """What is compiled into a run."""

    name: str = "adam"
    parameters: str = "float32"


class Run(NamedTuple):
    """All losses and gradient norms of a run, and what was said at each check."""

    loss: np.ndarray
    norm: np.ndarray
    said: frozenset[str]
    fault: str = ""  # the finding that its setting is a case of


def main(argv=None):
    arguments = parser(__doc__)
    text = "of each setting; default 7, of rounding 2"
    arguments.add_argument("--seeds", type=int, help=text)
    arguments.add_argument("--first-seed", type=int, default=200)
    arguments.add_argument("--tasks", nargs="+", default=list(TASKS))
    arguments.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS))
    arguments.add_argument("--steps", type=int, default=500, help="a multiple of 50")
    args = arguments.parse_args(argv)
    if args.steps < 350 or args.steps % CHECK:
        arguments.error(f"expected --steps >= 350 in steps of 50, got {args.steps}")
    rounds = [
        (name, task, args.first_seed + i)
        for name, task in itertools.product(args.experiments, args.tasks)
        for i in range(args.seeds or (2 if name == "rounding" else 7))
    ]
    outcomes = {name: [] for name in args.experiments}
    for name, task, seed in tqdm(rounds, unit="sweep"):
        outcomes[name] += EXPERIMENTS[name](task, seed, args.steps)
    report([table(outcomes)])


def learning_rates(task, seed, steps):
    """Too large a learning rate: less than half of the best run's fall in loss."""
    outcomes = []
    for name, rates in {
        "adam": (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
        "momentum": (0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 100.0, 1000.0),
    }.items():
        settings = [Setting(learning_rate=rate) for rate in rates]
        runs = train(task, Optimizer(name), settings, seed, steps)
        best = min(end(run) for run in runs)
        outcomes += [(judged(run, best), run) for run in runs]
    return outcomes


def growth(task, seed, steps):
    """A loss or parameters that grow by a factor in each step."""
    settings = [Setting(growth=rate) for rate in (0.0, 0.01, 0.02, 0.04)]
    settings += [Setting(swelling=rate) for rate in (0.002, 0.005, 0.01, 0.02)]
    settings = [setting._replace(learning_rate=3e-3) for setting in settings]
    runs = train(task, Optimizer(), settings, seed, steps)
    return [(judged(run, end(runs[0])), run) for run in runs]


def unsteady(task, seed, steps):
    """Healthy runs, and symptoms of a drawn shape, size and period on top of them.

    Every second seed runs for twice as many steps.
    """
    draw = np.random.default_rng(seed)
    steps *= 1 + seed % 2
    faults = {
        "": [Setting(learning_rate=rate) for rate in (1e-3, 2e-3, 3e-3)],
        "loss oscillates": [
            Setting(
                swing=draw.uniform(0.5, 0.8),
                shape=draw.integers(len(_WAVES)),
                drift=draw.choice([1e-3, draw.uniform(-0.7, 0.7)]),
                period=draw.uniform(12, 50),
            )
            for _ in range(3)
        ],
        "bursts": [
            Setting(
                burst=draw.uniform(4, 10),
                width=draw.integers(1, 3),
                period=draw.integers(12, 33),
            )
            for _ in range(3)
        ],
        "growing norm": [
            Setting(steepening=draw.uniform(11, 17) / steps) for _ in range(3)
        ],
        "no progress": [Setting(learning_rate=rate) for rate in (0.0, 1e-9, 1e-7)],
    }
    names = [name for name, settings in faults.items() for _ in settings]
    runs = train(task, Optimizer(), [*itertools.chain(*faults.values())], seed, steps)
    pairs = zip(names, runs, strict=True)
    return [(WRONG if name else WELL, run._replace(fault=name)) for name, run in pairs]


def rounding(task, seed, steps):
    """Parameters of few digits: a tenth of what float32 gains is lost."""
    outcomes = []
    for name, rates in {
        "adam": (1e-5, 1e-4, 3e-4, 3e-3),
        "momentum": (3e-4, 3e-3, 0.03, 0.1),
    }.items():
        settings = [Setting(learning_rate=rate) for rate in rates]
        slow = [Setting(learning_rate=1e-6 * rate) for rate in rates]
        runs = train(task, Optimizer(name), [*settings, *slow], seed, steps)
        twins, slow_runs = runs[: len(rates)], runs[len(rates) :]
        outcomes += [(WELL, run) for run in twins]
        outcomes += [(WRONG, run) for run in slow_runs]
        for dtype in ("bfloat16", "float16"):
            runs = train(task, Optimizer(name, parameters=dtype), settings, seed, steps)
            for twin, run in zip(twins, runs, strict=True):
                gained = max(twin.loss[0] - end(twin), 1e-3)
                missing = (end(run) - end(twin)) / gained
                kind = WRONG if missing >= 0.1 else WELL if missing < 0.03 else BETWEEN
                outcomes.append((kind, run))
    return outcomes


EXPERIMENTS = {"learning rate": learning_rates, "growth": growth}
EXPERIMENTS |= {"unsteady": unsteady, "rounding": rounding}
# The findings that each experiment is to bring out.
EXPECTED = {
    "learning rate": ("loss diverges", "no progress"),
    "growth": ("loss diverges",),
    "unsteady": ("loss oscillates", "bursts", "growing norm", "no progress"),
    "rounding": ("lost updates",),
}


def train(task, optimizer, settings, seed, steps):
    """One `Run` for each setting, all with the same start and the same batches."""
    columns = zip(*settings, strict=True)
    stacked = Setting(*(jnp.asarray(x, jnp.float32) for x in columns))
    run = _compiled(task, optimizer, steps)
    losses, norms, states, histories = jax.device_get(run(stacked, seed))
    runs = []
    for i in range(len(settings)):
        log, said = diagnostics.HealthLog(), frozenset()
        for check in range(steps // CHECK):
            pick = functools.partial(jax.tree.map, lambda x: x[i, check])  # noqa: B023
            log(pick(states), pick(histories))
            said |= log.rules
        runs.append(Run(losses[i].ravel(), norms[i].ravel(), said))
    return runs


@functools.cache
def _compiled(name, optimizer, steps):
    task = tasks()[name]

    def one(setting, seed):
        adam, rate = optimizer.name == "adam", setting.learning_rate
        inner = optax.adam(rate) if adam else optax.sgd(rate, momentum=0.9)
        tx = jmp_scale.with_loss_scale(inner)
        params = task.init(jax.random.key(seed))
        opt_state = tx.init(params)
        params = cast(params, optimizer.parameters)
        history = diagnostics.LossScaleHistory.create(steps)

        def step(carry, k):
            params, old, history = carry
            loss, grads = _loss_and_grads(task, params, setting, seed, k, steps)
            updates, new = tx.update(grads, old, params, value=loss)
            norm = diagnostics.metrics(new, grads)["grad_norm"]
            known = {"loss": loss, "grads": grads, "params": params, "updates": updates}
            history = history.push(old, new, **known)
            params = optax.apply_updates(params, updates)
            swelling = jnp.where(k > steps // 5, 1 + setting.swelling, 1)
            params = jax.tree.map(lambda p: p * swelling.astype(p.dtype), params)
            return (params, new, history), (loss, norm)

        def chunk(carry, steps_of_chunk):
            carry, (loss, norm) = jax.lax.scan(step, carry, steps_of_chunk)
            _, opt_state, history = carry
            return carry, (loss, norm, opt_state, history)

        chunks = jnp.arange(steps).reshape(-1, CHECK)
        return jax.lax.scan(chunk, (params, opt_state, history), chunks)[1]

    return jax.jit(jax.vmap(one, (0, None)))


def _loss_and_grads(task, params, setting, seed, k, steps):
    draw, _ = jax.random.split(jax.random.key(1000 + seed))
    inputs, targets = task.examples(jax.random.fold_in(draw, k), task.batch)
    weight = jnp.exp2(setting.growth * jnp.maximum(k - steps // 5, 0))
    # The period is multiplied by exp(drift * k / steps).
    turns = -jnp.expm1(-setting.drift * k / steps) / setting.drift
    turns *= steps / setting.period
    wave = jax.lax.switch(setting.shape.astype(jnp.int32), _WAVES, turns)
    weight *= 1 + setting.swing * wave
    is_burst = (k - 1) % setting.period < setting.width
    weight *= jnp.where(is_burst, setting.burst, 1)

    def loss_fn(params):
        return weight * jnp.mean(task.losses(cast(params, "float32"), inputs, targets))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    steeper = jnp.exp2(setting.steepening * k)
    return loss, jax.tree.map(lambda g: g * steeper, cast(grads, "float32"))


# Waves from -1 to 1 of a number of turns: sine, square, rising and falling saw, and a
# square that is above its mean in a third of the time.
_WAVES = (
    lambda turns: jnp.sin(2 * jnp.pi * turns),
    lambda turns: jnp.where(turns % 1 < 1 / 2, 1.0, -1.0),
    lambda turns: 2 * (turns % 1) - 1,
    lambda turns: 1 - 2 * (turns % 1),
    lambda turns: jnp.where(turns % 1 < 1 / 3, 1.0, -1.0),
)


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


def table(outcomes):
    columns = ["runs", "finding", "went wrong", "well", "between"]
    columns += ["said of wrong", "of well", "of between", "precision", "recall"]
    result = Table("Findings of HealthLog on runs that go wrong and on others", columns)
    for name, judged_runs in outcomes.items():
        kinds = EXPECTED[name]
        if len(kinds) > 1:
            for kind in kinds:
                result.rows.append([name, kind, *scores(judged_runs, {kind}, kind)])
        label = kinds[0] if len(kinds) == 1 else "any of these"
        result.rows.append([name, label, *scores(judged_runs, set(kinds))])
        others = {kind for _, run in judged_runs for kind in run.said}
        for kind in sorted(others - set(kinds)):
            result.rows.append([name, f"({kind})", *scores(judged_runs, {kind})])
    result.notes.append(
        "precision: of the runs of which it was said and that are not between, those "
        "that went wrong. recall: of those that went wrong, those of which it was "
        "said; where an experiment is for several findings, of those that went wrong "
        "in its way. In parentheses: findings that the experiment was not made for."
    )
    return result


def scores(judged_runs, wanted, kind=None):
    """The counts of a row: runs, those of which a finding was made, and the shares."""
    counts = {kind: [0, 0] for kind in (WRONG, WELL, BETWEEN)}
    missed = wrong = 0
    for outcome, run in judged_runs:
        is_said = not wanted.isdisjoint(run.said)
        counts[outcome][0] += 1
        counts[outcome][1] += is_said
        if outcome == WRONG and (kind is None or kind in cases(run)):
            wrong += 1
            missed += not is_said
    (_, hits), (well, false), (between, unclear) = counts.values()
    precision = f"{hits / (hits + false):.2f}" if hits + false else "-"
    recall = f"{1 - missed / wrong:.2f}" if wrong else "-"
    return [wrong, well, between, hits, false, unclear, precision, recall]


if __name__ == "__main__":
    main()
