"""What goes wrong with loss scaling in practice, tried with every library that is installed.

Every cell is a run: of training with the loss w * x, whose gradient x is given (so that any step can be
made to overflow), or of the one function that the row is about. `right` and `wrong` are what the run
gave, an exception's name where there was one, `-` where a library has no such thing, and
`not installed`. torch and keras run in the same way; the latter on JAX.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import importlib.util
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jmp_scale

MODULES = {"jmp": "jmp", "flax": "flax", "mpx": "mpx", "optax": "optax", "torch": "torch", "keras": "keras",
           "jmp_scale": "jmp_scale"}  # fmt: skip
INF = math.inf


class Step(NamedTuple):
    """The parameter and the loss scale after a step."""

    w: float
    s: float


def train_jmp(
    xs: Sequence[float], s: float = 8.0, period: int = 2000, low: float = 1.0, tx: Any = None
) -> list[Step]:
    import jmp

    loss_scale = jmp.DynamicLossScale(jnp.float32(s), jnp.int32(0), period, 2, jnp.float32(low))
    return _train_with_verbs(jmp, loss_scale, xs, tx or optax.sgd(1.0))


def train_mpx(
    xs: Sequence[float], s: float = 8.0, period: int = 2000, low: float = 1.0, tx: Any = None
) -> list[Step]:
    import mpx

    tx = tx or optax.sgd(1.0)
    w = jnp.float32(1)
    state = tx.init(w)
    scaling = mpx.DynamicLossScaling(jnp.float32(s), jnp.float32(low), period=period)

    @jax.jit
    def step(w, state, scaling, x):
        _, scaling, finite, grad = mpx.filter_value_and_grad(lambda w, x: w * x, scaling)(w, x)
        return *mpx.optimizer_update(w, tx, state, grad, finite), scaling

    steps = []
    for x in xs:
        w, state, scaling = step(w, state, scaling, jnp.float32(x))
        steps.append(Step(float(w), float(scaling.loss_scaling)))
    return steps


def train_flax(
    xs: Sequence[float], s: float = 8.0, period: int = 2000, low: float | None = None, tx: Any = None
) -> list[Step]:
    from flax.training.dynamic_scale import DynamicScale

    tx = tx or optax.sgd(1.0)
    w = jnp.float32(1)
    state = tx.init(w)
    scale = DynamicScale(
        growth_interval=period, scale=jnp.float32(s), **({} if low is None else {"minimum_scale": low})
    )

    @jax.jit
    def step(w, state, scale, x):
        scale, finite, _, grad = scale.value_and_grad(lambda w, x: w * x)(w, x)
        updates, new_state = tx.update(grad, state, w)
        new = (optax.apply_updates(w, updates), new_state)
        return *jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (w, state)), scale

    steps = []
    for x in xs:
        w, state, scale = step(w, state, scale, jnp.float32(x))
        steps.append(Step(float(w), float(scale.scale)))
    return steps


def train_optax(xs: Sequence[float], tx: Any = None) -> list[Step]:
    tx = optax.apply_if_finite(tx or optax.sgd(1.0), max_consecutive_errors=50)
    w = jnp.float32(1)
    state = tx.init(w)

    @jax.jit
    def step(w, state, x):
        updates, state = tx.update(x, state, w)
        return optax.apply_updates(w, updates), state

    steps = []
    for x in xs:
        w, state = step(w, state, jnp.float32(x))
        steps.append(Step(float(w), 1.0))
    return steps


def train_torch(xs: Sequence[float], s: float = 8.0, period: int = 2000, tx: Any = None) -> list[Step]:
    import torch

    w = torch.tensor(1.0, requires_grad=True)
    optimizer = torch.optim.AdamW([w], 0.1) if tx else torch.optim.SGD([w], 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=s, growth_interval=period)
    steps = []
    for x in xs:
        optimizer.zero_grad()
        scaler.scale(w * x).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append(Step(w.item(), scaler.get_scale()))
    return steps


def train_keras(xs: Sequence[float], s: float = 8.0, period: int = 2000, tx: Any = None) -> list[Step]:
    import keras

    inner = keras.optimizers.AdamW(0.1) if tx else keras.optimizers.SGD(1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=s, dynamic_growth_steps=period)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    state, w = [v.value for v in optimizer.variables], [variable.value]
    where = next(i for i, v in enumerate(optimizer.variables) if v is optimizer.dynamic_scale)

    @jax.jit
    def step(w, state, x):
        grads = [jax.grad(lambda w: w * x * state[where])(w[0])]
        return optimizer.stateless_apply(state, grads, w)

    steps = []
    for x in xs:
        w, state = step(w, state, jnp.float32(x))
        steps.append(Step(float(w[0]), float(state[where])))
    return steps


def train_jmp_scale(
    xs: Sequence[float], s: float = 8.0, period: int = 2000, low: float = 1.0, tx: Any = None
) -> list[Step]:
    tx = jmp_scale.with_loss_scale(
        tx or optax.sgd(1.0), jmp_scale.DynamicLossScale(s, None, period, 2, low, max_loss_scale=2.0**126)
    )
    w = jnp.float32(1)
    state = tx.init(w)

    @jax.jit
    def step(w, state, x):
        _, grad = jmp_scale.value_and_grad(lambda w, x: w * x, state.loss_scale)(w, x)
        updates, state = tx.update(grad, state, w)
        return optax.apply_updates(w, updates), state

    steps = []
    for x in xs:
        w, state = step(w, state, jnp.float32(x))
        steps.append(Step(float(w), float(state.loss_scale.loss_scale)))
    return steps


def _train_with_verbs(library: Any, loss_scale: Any, xs: Sequence[float], tx: Any) -> list[Step]:
    @jax.jit
    def step(w, state, loss_scale, x):
        grad = loss_scale.unscale(jax.grad(lambda w: loss_scale.scale(w * x))(w))
        finite = library.all_finite(grad)
        updates, new_state = tx.update(grad, state, w)
        new = (optax.apply_updates(w, updates), new_state)
        return *library.select_tree(finite, new, (w, state)), loss_scale.adjust(finite)

    w = jnp.float32(1)
    state = tx.init(w)
    steps = []
    for x in xs:
        w, state, loss_scale = step(w, state, loss_scale, jnp.float32(x))
        steps.append(Step(float(w), float(loss_scale.loss_scale)))
    return steps


TRAIN = {"jmp": train_jmp, "flax": train_flax, "mpx": train_mpx, "optax": train_optax, "torch": train_torch,
         "keras": train_keras, "jmp_scale": train_jmp_scale}  # fmt: skip
HAS_FLOOR = ["jmp", "flax", "mpx", "jmp_scale"]
HAS_SCALE = [name for name in TRAIN if name != "optax"]


def gradients_stay_true_when_s_grows(train: Any) -> bool:
    ws = [1.0] + [step.w for step in train([0.25] * 3, s=8.0, period=1)]
    return all(old - new == 0.25 for old, new in itertools.pairwise(ws))


def a_good_step_after_200_bad_ones_trains(train: Any) -> bool:
    steps = train([INF] * 200 + [0.5] * 2, s=2.0**15)
    return steps[-1].s > 0 and steps[-1].w == 0.0


def a_skipped_step_with_adamw_moves_nothing(train: Any) -> bool:
    first, skipped, *_ = train([0.5, INF], tx=optax.adamw(0.1))
    return first.w == skipped.w


def a_step_after_a_skip_is_as_if_there_was_none(train: Any) -> bool:
    with_skip = train([0.5, INF, 0.25], tx=optax.adamw(0.1))
    return with_skip[-1].w == train([0.5, 0.25], tx=optax.adamw(0.1))[-1].w


def a_hundred_bad_steps_in_a_row_are_all_skipped(train: Any) -> bool:
    return train([math.nan] * 100)[-1].w == 1.0


def a_floor_below_one_is_kept_under_jit(train: Any) -> bool:
    return train([INF] * 5, s=2.0, low=2.0**-10)[-1].s == 2.0**-4


def s_never_grows_to_infinity_or_stops_training(train: Any) -> bool:
    steps = train([2.0**-20] * 300, s=2.0**15, period=1)
    return math.isfinite(steps[-1].s) and steps[-1].w < steps[-2].w < 1.0


def s_stays_a_power_of_two(train: Any) -> bool:
    return all(math.log2(step.s).is_integer() for step in train([2.0**-20] * 40, s=2.0**15, period=1))


def s_grows_on_the_period_th_finite_step(train: Any) -> bool:
    return [step.s for step in train([0.25] * 6, s=8.0, period=3)] == [8, 8, 16, 16, 16, 32]


def _loss_scales(s: Any) -> dict[str, Callable[[], Any]]:
    def jmp():
        import jmp

        return jmp.DynamicLossScale(s)

    def mpx():
        import mpx

        return mpx.DynamicLossScaling(s, jnp.float32(1))

    return {"jmp": jmp, "mpx": mpx, "jmp_scale": lambda: jmp_scale.DynamicLossScale(s)}


def _finite_checks() -> dict[str, Callable[[Any], Any]]:
    def jmp(tree):
        import jmp

        return jmp.all_finite(tree)

    def mpx(tree):
        import mpx

        return mpx.all_finite(tree)

    return {"jmp": jmp, "mpx": mpx, "jmp_scale": jmp_scale.all_finite}


def a_float16_loss_is_scaled_without_overflow(make: Any) -> bool:
    return float(make().scale(jnp.float16(3.0))) == 3 * 2.0**15


def unscaling_float16_keeps_what_scaling_saved(make: Any) -> bool:
    grad = make().unscale(jnp.float16(1e-3))
    return float(grad) == float(jnp.float16(1e-3)) / 2.0**15


def integers_pass_unscale_unchanged(make: Any) -> bool:
    return (
        int(make().unscale({"i": jnp.int32(3)})["i"]) == 3 and make().unscale(jnp.int32(3)).dtype == jnp.int32
    )


def a_float16_s_is_adjusted(make: Any) -> bool:
    return float(make().adjust(jnp.array(False)).loss_scale) == 2.0**14


def a_step_compiles_once_from_the_documented_start(make: Any) -> bool:
    adjust = jax.jit(lambda loss_scale: loss_scale.adjust(jnp.array(True)))
    loss_scale = make()
    for _ in range(4):
        loss_scale = adjust(loss_scale)
    return adjust._cache_size() == 1


def a_step_is_compiled_ahead_of_time(make: Any) -> bool:
    return jax.jit(lambda s: s.adjust(jnp.array(True))).lower(make()).compile() is not None


def leaves_have_names(make: Any) -> bool:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(make())]
    return bool(paths) and not any("[" in path for path in paths)


def a_pickled_scale_goes_on_where_it_was(make: Any) -> bool:
    before = make().adjust(jnp.array(False)).adjust(jnp.array(True))
    after = pickle.loads(pickle.dumps(before))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def an_empty_tree_is_finite(all_finite: Any) -> bool:
    return bool(all_finite({}))


def integer_leaves_are_finite(all_finite: Any) -> bool:
    return bool(all_finite({"i": jnp.int32(3), "key": jax.random.key(0)}))


def replicas_agree_without_being_told(all_finite: Any) -> bool:
    flags = jax.pmap(all_finite)(jnp.array([INF, 1.0]))
    return not flags.any()


def float16_gradients_meet_float32_parameters(wrap: Any) -> bool:
    tx, w = wrap(optax.adamw(0.1)), jnp.float32(1)
    updates, _ = jax.jit(tx.update)(jnp.float16(0.5), tx.init(w), w)
    return updates.dtype == jnp.float32


def a_float16_overflow_is_seen_before_clipping(wrap: Any) -> bool:
    tx, w = wrap(optax.chain(optax.clip(1.0), optax.sgd(1.0))), jnp.ones(3)
    updates, _ = tx.update(jnp.array([INF, 1.0, -INF]), tx.init(w), w)
    return not updates.any()


def large_float16_gradients_survive_a_global_norm(wrap: Any) -> bool:
    tx, w = wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))), jnp.ones(2)
    updates, _ = tx.update(jnp.array([300.0, 300.0], jnp.float16), tx.init(w), w)
    return bool((updates != 0).all())


def rows() -> list[tuple[dict[str, Any], Callable[[Any], bool]]]:
    """(what is tried of each library, how): one row of the table each."""
    trains = {name: TRAIN[name] for name in HAS_SCALE}
    floors = {name: TRAIN[name] for name in HAS_FLOOR}
    scales = _loss_scales(jnp.float32(2.0**15))
    wrappers = {
        "optax": lambda tx: optax.apply_if_finite(tx, 5),
        "jmp_scale": jmp_scale.with_loss_scale,
    }
    checks = _finite_checks()
    return [
        (trains, gradients_stay_true_when_s_grows),
        (trains, a_good_step_after_200_bad_ones_trains),
        (TRAIN, a_skipped_step_with_adamw_moves_nothing),
        (TRAIN, a_step_after_a_skip_is_as_if_there_was_none),
        (TRAIN, a_hundred_bad_steps_in_a_row_are_all_skipped),
        (floors, a_floor_below_one_is_kept_under_jit),
        (trains, s_never_grows_to_infinity_or_stops_training),
        (trains, s_stays_a_power_of_two),
        (trains, s_grows_on_the_period_th_finite_step),
        (_loss_scales(2.0**15) | {"mpx": scales["mpx"]}, a_float16_loss_is_scaled_without_overflow),
        (_loss_scales(2.0**15) | {"mpx": scales["mpx"]}, unscaling_float16_keeps_what_scaling_saved),
        (_loss_scales(jnp.float16(2.0**15)), a_float16_s_is_adjusted),
        (scales, integers_pass_unscale_unchanged),
        (scales, a_step_compiles_once_from_the_documented_start),
        (scales, a_step_is_compiled_ahead_of_time),
        (scales, leaves_have_names),
        (scales, a_pickled_scale_goes_on_where_it_was),
        (checks, an_empty_tree_is_finite),
        (checks, integer_leaves_are_finite),
        (checks, replicas_agree_without_being_told),
        (wrappers, float16_gradients_meet_float32_parameters),
        (wrappers, a_float16_overflow_is_seen_before_clipping),
        (wrappers, large_float16_gradients_survive_a_global_norm),
    ]


def verdict(library: str, subjects: dict[str, Any], check: Callable[[Any], bool]) -> str:
    if importlib.util.find_spec(MODULES[library]) is None:
        return "not installed"
    if library not in subjects:
        return "-"
    try:
        return "right" if check(subjects[library]) else "**wrong**"
    except Exception as error:  # whatever a library raises is its answer
        return f"**{type(error).__name__}**"


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--libraries", nargs="+", default=list(MODULES), choices=list(MODULES), help="to try")
    args = parser.parse_args(argv)
    if jax.default_backend() == "cpu" and jax.device_count() < 2:
        parser.error("the rows about replicas need two devices: set JAX_NUM_CPU_DEVICES=2")
    table = _harness.Table("Right and wrong", ["what should hold", *args.libraries])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for subjects, check in tqdm(rows(), desc="rows", leave=False):
            claim = check.__name__.replace("_", " ")
            table.rows.append([claim, *(verdict(name, subjects, check) for name in args.libraries)])
    _harness.report([table], args.json)


if __name__ == "__main__":
    main()
