"""How often each sentence of `diagnostics.HealthLog` on finite runs is right.

Trains small tasks that go wrong in known ways, and the same tasks when they do not,
asks a `HealthLog` every 50 steps, and counts: of the runs of which a sentence was said,
how many went wrong (precision), and of how many that went wrong it was said (recall).
Whether a run went wrong is read off its end, or off the same run without the fault,
neither of which health can know.

The rules were tuned on other networks, and what counts as wrong on these with the seeds
0 and 100, except that cases of "loss diverges" were defined after a look at the first
two of the default seeds.
"""

import itertools

import numpy as np
from _harness import Table, parser, report
from _health_runs import Optimizer, Setting, train
from tqdm import tqdm

TASKS = ("autoencoder", "classifier", "char-LM")
FINITE = ("loss diverges", "loss blew up", "gradients vanished")
WRONG, WELL, BETWEEN = "wrong", "well", "between"


def main(argv=None):
    arguments = parser(__doc__)
    text = "of each setting; default 7, of rounding 2"
    arguments.add_argument("--seeds", type=int, help=text)
    arguments.add_argument("--first-seed", type=int, default=200)
    arguments.add_argument("--tasks", nargs="+", default=list(TASKS))
    arguments.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS))
    arguments.add_argument("--steps", type=int, default=500, help="a multiple of 50")
    args = arguments.parse_args(argv)
    if args.steps < 200 or args.steps % 50:
        arguments.error(f"expected --steps >= 200 in steps of 50, got {args.steps}")
    rounds = [
        (name, task, args.first_seed + i)
        for name, task in itertools.product(args.experiments, args.tasks)
        for i in range(args.seeds or (2 if name == "rounding" else 7))
    ]
    outcomes = {name: [] for name in args.experiments}
    for name, task, seed in tqdm(rounds, unit="sweep"):
        outcomes[name] += EXPERIMENTS[name](task, seed, args.steps)
    report([table(outcomes)], args.json)


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


EXPERIMENTS = {"learning rate": learning_rates, "growth": growth, "rounding": rounding}
# The findings that each experiment is to bring out.
EXPECTED = {
    "learning rate": FINITE,
    "growth": ("loss diverges",),
    "rounding": ("lost updates",),
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
    first, last = run.loss[0], end(run)
    lowest = np.nanmin(run.loss.reshape(-1, 50).mean(1))
    late_norm = np.nanmean(run.norm[-len(run.norm) // 10 :])
    are = {
        "loss diverges": last - lowest > max(first - lowest, abs(lowest)) / 2,
        "loss blew up": np.nanmax(run.loss) > 3 * first,
        "gradients vanished": late_norm < 1e-3 * run.norm[0],
    }
    return {kind for kind, is_case in are.items() if is_case}


def table(outcomes):
    columns = ["runs", "finding", "went wrong", "well", "between"]
    columns += ["said of wrong", "of well", "of between", "precision", "recall"]
    result = Table("Findings of health on runs that go wrong and on others", columns)
    for name, judged_runs in outcomes.items():
        kinds = EXPECTED[name]
        if len(kinds) > 1:
            for kind in kinds:
                result.rows.append([name, kind, *scores(judged_runs, {kind}, kind)])
        label = kinds[0] if len(kinds) == 1 else "any of these"
        result.rows.append([name, label, *scores(judged_runs, set(kinds))])
        others = {k for _, run in judged_runs for _, said in run.said for k in said}
        for kind in sorted(others - set(kinds)):
            result.rows.append([name, f"({kind})", *scores(judged_runs, {kind})])
    pooled = outcomes.get("learning rate", []) + outcomes.get("growth", [])
    row = scores(pooled, {"loss diverges"}, "loss diverges")
    result.rows.append(["learning rate, growth", "loss diverges", *row])
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
        is_said = any(run.first(found) is not None for found in wanted)
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
