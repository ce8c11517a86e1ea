"""What goes wrong with loss scaling, tried with every library that is installed.

Every cell is a run: of a short training, as each library's documentation writes it, or
of the one function that the row is about. The loss is w * x, so that any step can be
made to overflow. `right` and `wrong` are what the run gave, an exception's name where
there was one, `-` where it was not tried, mostly because the library leaves the matter
to the training loop, and `not installed`.
"""

import importlib.util
import itertools
import math
import warnings
from typing import Any, NamedTuple

import _harness
import _steps
import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import jmp_scale

MAX_CONSECUTIVE_ERRORS = 50  # after which apply_if_finite applies the next one


class Step(NamedTuple):
    """The parameter and the loss scale after a step."""

    w: float
    s: float


def train_jmp(xs, s=8.0, period=2000, min_loss_scale=1.0, tx=None):
    options = {"period": period, "min_loss_scale": jnp.asarray(min_loss_scale)}
    made = _steps.jmp(_loss, tx or optax.sgd(1.0), jnp.float32(1), s, **options)
    return _train(*made, xs, "loss_scale")


def train_mpx(xs, s=8.0, period=2000, min_loss_scale=1.0, tx=None):
    import mpx

    tx = tx or optax.sgd(1.0)
    scaling = mpx.DynamicLossScaling(
        jnp.float32(s), jnp.float32(min_loss_scale), period=period
    )

    def step(carry, x):
        w, state, scaling = carry
        value_and_grad = mpx.filter_value_and_grad(_loss, scaling)
        loss, scaling, finite, grad = value_and_grad(w, x)
        return (*mpx.optimizer_update(w, tx, state, grad, finite), scaling), loss

    w = jnp.float32(1)
    return _train((w, tx.init(w), scaling), step, xs, "loss_scaling")


def train_flax(xs, s=8.0, period=2000, min_loss_scale=None, tx=None):
    options = {} if min_loss_scale is None else {"minimum_scale": min_loss_scale}
    options["growth_interval"] = period
    made = _steps.flax(_loss, tx or optax.sgd(1.0), jnp.float32(1), s, **options)
    return _train(*made, xs, "scale")


def train_optax(xs, tx=None):
    tx = optax.apply_if_finite(tx or optax.sgd(1.0), MAX_CONSECUTIVE_ERRORS)

    def step(carry, x):
        w, state, s = carry
        updates, state = tx.update(x, state, w)
        return (optax.apply_updates(w, updates), state, s), None

    w = jnp.float32(1)
    return _train((w, tx.init(w), w), step, xs, "real")


def train_jmp_scale(xs, s=8.0, period=2000, min_loss_scale=1.0, tx=None):
    loss_scale = jmp_scale.DynamicLossScale(
        s, None, period, 2, min_loss_scale, max_loss_scale=2.0**126
    )
    tx = jmp_scale.with_loss_scale(tx or optax.sgd(1.0), loss_scale)

    def step(carry, x):
        w, state, _ = carry
        loss, grad = jmp_scale.value_and_grad(_loss, state.loss_scale)(w, x)
        updates, state = tx.update(grad, state, w)
        return (optax.apply_updates(w, updates), state, state.loss_scale), loss

    w = jnp.float32(1)
    return _train((w, tx.init(w), loss_scale), step, xs, "loss_scale")


def _loss(w, x):
    return w * x


def _train(carry, step, xs, name):
    """Runs a step of (w, state, scale), whose S has the given name."""
    step, steps = jax.jit(step), []
    for x in xs:
        carry, _ = step(carry, jnp.float32(x))
        w, _, scale = carry
        steps.append(Step(float(w), float(getattr(scale, name))))
    return steps


TRAIN = {
    "jmp": train_jmp,
    "flax": train_flax,
    "mpx": train_mpx,
    "optax": train_optax,
    "jmp_scale": train_jmp_scale,
}


VERBS = ("jmp", "mpx", "jmp_scale")  # have jmp's functions


def verb(name):
    """Library -> its function of that name, looked up when it is called."""

    def of(library):
        return lambda *args: getattr(importlib.import_module(library), name)(*args)

    return {library: of(library) for library in VERBS}


def flax_scale(**kwargs: Any):
    from flax.training.dynamic_scale import DynamicScale

    return DynamicScale(**kwargs)


def loss_scales(s):
    """() -> a loss scale that starts at `s`, made as in the library's documentation"""

    def mpx():
        import mpx

        floor = jnp.ones((), jnp.float32)
        return mpx.DynamicLossScaling(jnp.float32(s), min_loss_scaling=floor)

    return {
        "jmp": lambda: verb("DynamicLossScale")["jmp"](jnp.asarray(s)),
        "flax": lambda: flax_scale(scale=s),
        "mpx": mpx,
        "jmp_scale": lambda: jmp_scale.DynamicLossScale(s),
    }


def steps():
    """(() -> a loss scale, loss scale -> that after a finite step)"""

    def adjusted(loss_scale):
        return loss_scale.adjust(jnp.array(True))

    def flax(dynamic_scale):
        return dynamic_scale.value_and_grad(lambda w: w * w)(jnp.float32(1))[0]

    makers = loss_scales(2.0**15).items()
    return {name: (make, flax if name == "flax" else adjusted) for name, make in makers}


def gradients():
    """(loss, w, S, axis name or None) -> unscaled gradient, averaged over the axis"""

    def jmp(loss_fn, w, s):
        loss_scale = loss_scales(s)["jmp"]()
        return loss_scale.unscale(jax.grad(lambda w: loss_scale.scale(loss_fn(w)))(w))

    def mpx(loss_fn, w, s):
        import mpx

        scaling = loss_scales(s)["mpx"]()
        return scaling.unscale(jax.grad(mpx.scaled(loss_fn, scaling))(w))

    def ours(loss_fn, w, s):
        return jmp_scale.grad(loss_fn, jmp_scale.DynamicLossScale(s))(w)

    def flax(loss_fn, w, s, axis_name=None):
        return flax_scale(scale=s).value_and_grad(loss_fn, axis_name=axis_name)(w)[3]

    def averaged(grad_fn):
        def grad(loss_fn, w, s, axis_name=None):
            grad = grad_fn(loss_fn, w, s)
            return grad if axis_name is None else jax.lax.pmean(grad, axis_name)

        return grad

    others = {"jmp": jmp, "mpx": mpx, "jmp_scale": ours}
    return {name: averaged(fun) for name, fun in others.items()} | {"flax": flax}


LIBRARIES = list(TRAIN)  # by the names of their modules
TAKES_OPTAX = ["jmp", "flax", "mpx", "jmp_scale"]
INF = math.inf


def gradients_stay_true_when_s_grows(train):
    ws = [1.0] + [step.w for step in train([0.25] * 3, s=8.0, period=1)]
    return all(old - new == 0.25 for old, new in itertools.pairwise(ws))


def a_good_step_after_200_bad_ones_trains(train):
    steps = train([INF] * 200 + [0.5] * 2, s=2.0**15)
    return steps[-1].s > 0 and steps[-1].w == 0.0


def a_skipped_step_with_adamw_moves_nothing(train):
    first, skipped, *_ = train([0.5, INF], tx=optax.adamw(0.1))
    return first.w == skipped.w


def a_step_after_a_skip_is_as_if_there_was_none(train):
    with_skip = train([0.5, INF, 0.25], tx=optax.adamw(0.1))
    return with_skip[-1].w == train([0.5, 0.25], tx=optax.adamw(0.1))[-1].w


def a_hundred_bad_steps_in_a_row_are_all_skipped(train):
    return train([math.nan] * 100)[-1].w == 1.0


def a_floor_below_one_is_kept_under_jit(train):
    return train([INF] * 5, s=2.0, min_loss_scale=2.0**-10)[-1].s == 2.0**-4


def s_never_grows_to_infinity_or_stops_training(train):
    steps = train([2.0**-20] * 300, s=2.0**15, period=1)
    return math.isfinite(steps[-1].s) and steps[-1].w < steps[-2].w < 1.0


def s_stays_a_power_of_two(train):
    steps = train([2.0**-20] * 40, s=2.0**15, period=1)
    return all(math.log2(step.s).is_integer() for step in steps)


def s_grows_on_the_last_step_of_a_finite_period(train):
    found = [step.s for step in train([0.25] * 6, s=8.0, period=3)]
    return found == [8, 8, 16, 16, 16, 32]


def unscaling_float16_keeps_what_scaling_saved(gradient):
    slope = jnp.float32(1e-3) / 2.0**15  # in float16 zero, and scaled 1e-3
    found = gradient(lambda w: w.astype(jnp.float32) * slope, jnp.float16(1), 2.0**15)
    return float(found) == float(jnp.float16(1e-3)) / 2.0**15


def integers_pass_unscale_unchanged(make):
    unscaled = make().unscale({"i": jnp.int32(3)})["i"]
    return int(unscaled) == 3 and unscaled.dtype == jnp.int32


def a_step_is_compiled_ahead_of_time(step):
    make, adjust = step
    return jax.jit(adjust).lower(make()).compile() is not None


def leaves_have_names(step):
    leaves = jax.tree_util.tree_leaves_with_path(step[0]())
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    return bool(paths) and not any("[" in path for path in paths)


def an_empty_tree_is_finite(all_finite):
    return bool(all_finite({}))


def integers_and_keys_are_finite(all_finite):
    return bool(all_finite({"i": jnp.int32(3), "key": jax.random.key(0)}))


def s_recovers_from_200_bad_steps(train):
    xs = [math.nan] * 200 + [2.0**-20] * 40
    return train(xs, s=2.0**15, period=1)[-1].s >= 2.0**15


def a_schedule_does_not_count_skipped_steps(train):
    tx = optax.sgd(lambda count: jnp.array([1.0, 0.0, 0.0])[count])
    return train([math.nan, math.nan, 0.5], tx=tx)[-1].w == 0.5


def accumulation_leaves_out_an_overflowed_batch(train):
    tx = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    return [step.w for step in train([0.5, INF, 0.25], tx=tx)] == [1.0, 1.0, 0.625]


def complex_gradients_keep_their_imaginary_part(gradient):
    w = jnp.complex64(1 + 2j)
    return complex(gradient(lambda w: (w * w.conj()).real, w, 8.0)) == complex(2 - 4j)


def a_mean_over_replicas_does_not_overflow_float16(gradient):
    step = jax.pmap(
        lambda w: gradient(lambda w: w * jnp.float16(60000), w, 1.0, "i"), axis_name="i"
    )
    return step(jnp.ones(2, jnp.float16)).tolist() == [60000.0, 60000.0]


def functions_in_a_tree_are_selected(select):
    new, old = ({"w": jnp.float32(w), "activation": jnp.tanh} for w in (1, 2))
    return float(select(jnp.array(False), new, old)["w"]) == 2.0


def rows():
    """(what is tried of each library, how): one row of the table each."""
    scaled = {name: train for name, train in TRAIN.items() if name != "optax"}
    by_optax = {name: TRAIN[name] for name in TAKES_OPTAX}
    skips = by_optax | {"optax": TRAIN["optax"]}
    scales = loss_scales(2.0**15)
    verbs = {name: scales[name] for name in VERBS}
    checks, selects = verb("all_finite"), verb("select_tree")
    by_gradient, by_step = gradients(), steps()
    return [
        (scaled, gradients_stay_true_when_s_grows),
        (scaled, a_good_step_after_200_bad_ones_trains),
        (TRAIN, a_skipped_step_with_adamw_moves_nothing),
        (TRAIN, a_step_after_a_skip_is_as_if_there_was_none),
        (TRAIN, a_hundred_bad_steps_in_a_row_are_all_skipped),
        (by_optax, a_floor_below_one_is_kept_under_jit),
        (scaled, s_never_grows_to_infinity_or_stops_training),
        (scaled, s_stays_a_power_of_two),
        (scaled, s_grows_on_the_last_step_of_a_finite_period),
        (scaled, s_recovers_from_200_bad_steps),
        (skips, a_schedule_does_not_count_skipped_steps),
        (skips, accumulation_leaves_out_an_overflowed_batch),
        (by_gradient, unscaling_float16_keeps_what_scaling_saved),
        (verbs, integers_pass_unscale_unchanged),
        (by_step, a_step_is_compiled_ahead_of_time),
        (by_step, leaves_have_names),
        (checks, an_empty_tree_is_finite),
        (checks, integers_and_keys_are_finite),
        (selects, functions_in_a_tree_are_selected),
        (by_gradient, a_mean_over_replicas_does_not_overflow_float16),
        (by_gradient, complex_gradients_keep_their_imaginary_part),
    ]


def verdict(library, subjects, check):
    if importlib.util.find_spec(library) is None:
        return "not installed"
    if library not in subjects:
        return "-"
    try:
        return "right" if check(subjects[library]) else "**wrong**"
    except ImportError as error:
        return f"not installed: {error.name}"
    except (TypeError, ValueError) as error:  # a library's answer
        return f"**{type(error).__name__}**"


def main(argv=None):
    parser = _harness.parser(__doc__)
    parser.parse_args(argv)
    if jax.device_count() < 2:
        parser.error("needs two devices: set JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2")
    table = _harness.Table("Right and wrong", ["what should hold", *LIBRARIES])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for subjects, check in tqdm(rows(), desc="rows", leave=False):
            verdicts = [verdict(name, subjects, check) for name in LIBRARIES]
            table.rows.append([check.__name__.replace("_", " "), *verdicts])
    _harness.report([table])


if __name__ == "__main__":
    main()
