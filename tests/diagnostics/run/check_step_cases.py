"""Train steps with one mistake each, and right ones beside them, for `check_step`.

A step is a maker and its settings; it returns (step, arguments). Most mistakes are one
function, which stands in `step_of` where the right one stands. `WRONG` has the steps
that a rule must find, by rule and name, `RIGHT` those that must be clean. A wrong step
after its rule's cure is among the right ones.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_scale
import jmp_scale.nnx


@jax.jit  # compiles faster than each operation
def arrays():
    shapes = (4, 16), (16, 2), (4, 2), (16, 4)
    w1, w2, w, x = map(jax.random.normal, jax.random.split(KEY, 4), shapes)
    params = {"w1": w1 / 2, "w2": w2 / 4}
    return params, jax.tree.map(lambda p: 0.9 * p, params), w / 2, x


KEY = jax.random.key(0)
PARAMS, OTHERS, W, X = arrays()


def loss_fn(params, x):
    return jnp.mean((jax.nn.gelu(x @ params["w1"]) @ params["w2"] - target(x)) ** 2)


def target(x):
    return jnp.tanh(x @ W)


HALF = {d: jmp_scale.autocast(loss_fn, d) for d in ("float16", "bfloat16")}
HALF["float32"] = loss_fn
ADAM, ADAMW = optax.scale_by_adam(), optax.adamw(1e-3)
INNER = {
    "adamw": ADAMW,
    "sgd": optax.sgd(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), ADAMW),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2)),
    "plateau": optax.chain(ADAMW, optax.contrib.reduce_on_plateau()),
    "warm-up": optax.adamw(optax.linear_schedule(0.0, 1e-2, 10)),
    "trace": optax.chain(ADAMW, optax.trace(0.9), optax.scale_by_schedule(jnp.tanh)),
}
LOSS_SCALES = {
    "dynamic": jmp_scale.DynamicLossScale(),
    "static": jmp_scale.StaticLossScale(2.0**10),
    "none": jmp_scale.NoOpLossScale(),
}
DYNAMIC = LOSS_SCALES["dynamic"]
GUARD = jmp_scale.SpikeGuard()
TX = jmp_scale.with_loss_scale(ADAMW, DYNAMIC)


# What a step does in one place: how it gets its loss and gradients.


def scaled(half, ls, *args):
    """As it should be."""
    return jmp_scale.value_and_grad(half, ls)(*args)


def plain(half, ls, *args):
    return jax.value_and_grad(half)(*args)


def captured(half, ls, *args):
    return scaled(half, DYNAMIC, *args)


def captured_parameters(half, ls, params, x):
    return scaled(half, ls, PARAMS, x)


def never_unscaled(half, ls, *args):
    return jax.value_and_grad(lambda *args: ls.scale(half(*args)))(*args)


def by_hand(half, ls, *args):
    """As it should be, too."""
    return ls.unscale(never_unscaled(half, ls, *args))


def loss_left_scaled(half, ls, *args):
    loss, grads = never_unscaled(half, ls, *args)
    return loss, ls.unscale(grads)


def unscaled_by_the_next_s(half, ls, *args):
    loss, grads = never_unscaled(half, ls, *args)
    return ls.adjust(jmp_scale.all_finite(grads)).unscale((loss, grads))


def penalty_unscaled(half, ls, params, x):
    loss, grads = never_unscaled(half, ls, params, x)
    grads = jax.tree.map(lambda g, p: g + 0.1 * p, grads, params)
    return ls.unscale((loss, grads))


def while_scaled(name, clip):
    def gradients(half, ls, params, x):
        loss, grads = never_unscaled(half, ls, params, x)
        grads, _ = clip.update(grads, clip.init(grads), params)
        return ls.unscale((loss, grads))

    gradients.__name__ = name
    return gradients


CLIPS = [
    while_scaled("clip by norm", optax.clip_by_global_norm(1.0)),
    while_scaled("clip by value", optax.clip(0.1)),
    while_scaled("clip adaptively", optax.adaptive_grad_clip(0.1)),
    while_scaled("clip large ones", optax.clip_by_global_norm(1e3)),
]
NO_NAN = while_scaled("nan_to_num", optax.stateless(lambda grads, _: no_nan(grads)))


def no_nan(grads):
    return jax.tree.map(jnp.nan_to_num, grads)


# What it does with the gradients before the optimizer gets them.


def nothing(grads, ls, params):
    """As it should be."""
    return grads


def unscaled_twice(grads, ls, params):
    return ls.unscale(grads)


def one_unscaled_twice(grads, ls, params):
    return {**grads, "w1": ls.unscale(grads["w1"])}


def one_left_scaled(grads, ls, params):
    return {**grads, "w2": ls.scale(grads["w2"])}


def clipped(grads, ls, params):
    return jax.tree.map(lambda g: jnp.clip(jnp.nan_to_num(g), -1, 1), grads)


def others_added_scaled(grads, ls, params):
    return jax.tree.map(jnp.add, ls.scale(jax.grad(loss_fn)(params, X)), grads)


# What it returns.


def all_of_it(moved, new, loss, params, old):
    """As it should be."""
    return moved, new, loss


def not_all_of_it(moved, new, loss, params, old):
    return moved, loss


def normalized(moved, new, loss, *_):
    """Weights of one size: a skip changes their last places."""
    return jax.tree.map(lambda w: w / jnp.linalg.norm(w), moved), new, loss


def decayed(moved, new, loss, params, old):
    return jax.tree.map(lambda m, p: m - 1e-3 * p, moved, params), new, loss


def narrowed(moved, new, loss, params, old):
    return {**moved, "w1": moved["w1"].astype(jnp.float16)}, new, loss


def put_back(moved, new, loss, params, old):
    return jmp_scale.select_tree(new.applied, moved, PARAMS), new, loss


def old_parameters(moved, new, loss, params, old):
    return params, new, loss


def old_state(moved, new, loss, params, old):
    return moved, old, loss


def state_anew(moved, new, loss, params, old):
    return moved, TX.init(params), loss


def adjusted_twice(moved, new, loss, params, old):
    again = new.loss_scale.adjust(new.grads_finite)
    return moved, new._replace(loss_scale=again), loss


WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 4).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "zero_nans": lambda tx: optax.chain(optax.zero_nans(), tx),
    "entries": lambda tx: optax.chain(optax.clip(0.1), tx),
}


def step_of(
    gradients=scaled,
    change=nothing,
    results=all_of_it,
    around=None,
    with_value=True,
    inner="adamw",
    inside=None,
    ls="dynamic",
    dtype="float16",
    times=1.0,
    guard=None,
    donate=(),
):
    """A step on Optax, which may differ in each place; `around` with_loss_scale too."""
    tx = WRAPPERS[inside](INNER[inner]) if inside else INNER[inner]
    tx = jmp_scale.with_loss_scale(tx, LOSS_SCALES[ls], guard=guard)
    tx = WRAPPERS[around](tx) if around else tx

    def half(*args):
        return times * HALF[dtype](*args)

    def is_scale(path, value):
        return isinstance(value, jmp_scale.LossScale)

    @functools.partial(jax.jit, donate_argnums=donate)
    def step(params, old, x):
        ls = optax.tree.get(old, "loss_scale", filtering=is_scale)
        loss, grads = gradients(half, ls, params, x)
        grads = change(grads, ls, params)
        value = {"value": loss} if with_value and not around else {}
        updates, new = tx.update(grads, old, params, **value)
        moved = optax.apply_updates(params, updates)
        return results(moved, new, loss, params, old)

    return step, (PARAMS, tx.init(PARAMS), X)


def learned(params, opt, *args, half=HALF["float16"], tx=TX):
    """The parameters, state and loss after a right step."""
    loss, grads = scaled(half, opt.loss_scale, params, *args)
    return *applied(params, opt, loss, grads, tx), loss


def applied(params, opt, loss, grads, tx=TX):
    updates, opt = tx.update(grads, opt, params, value=loss)
    return optax.apply_updates(params, updates), opt


# Steps with an average, keys, windows and half-precision parameters.


def average(
    select_by="applied",
    change=nothing,
    inner="adamw",
    accumulate=False,
    guard=None,
    donate=False,
):
    tx = jmp_scale.with_loss_scale(INNER[inner], DYNAMIC, guard=guard)

    def step(state, x):
        params, old, averages = state["params"], state["opt"], state["averages"]
        key, now = jax.random.split(state["key"])
        x = x + 1e-3 * jax.random.normal(now, x.shape)
        if accumulate:
            loss, grads = accumulated(params, old.loss_scale, x)
        else:
            loss, grads = scaled(HALF["float16"], old.loss_scale, params, x)
        grads = change(grads, old.loss_scale, params)
        params, new = applied(params, old, loss, grads, tx)
        values = {"params": params, "x": x.mean(0)}
        moved = jax.tree.map(lambda a, x: 0.9 * a + 0.1 * x, averages, values)
        if select_by:
            moved = jmp_scale.select_tree(getattr(new, select_by), moved, averages)
        metrics = {"loss": loss, **jmp_scale.diagnostics.metrics(new, grads)}
        return {"params": params, "opt": new, "averages": moved, "key": key}, metrics

    averages = {"params": jax.tree.map(lambda p: 1.1 * p, PARAMS), "x": jnp.zeros(4)}
    state = {"params": PARAMS, "opt": tx.init(PARAMS), "averages": averages}
    state["key"] = jax.random.key(1)
    step = jax.jit(step, donate_argnums=0 if donate else ())
    return step, (state, X)


def copies(mistake=None, form=tuple):
    """An average that starts as a copy, and a target that is copied now and then."""

    @jax.jit
    def step(target, opt, ema, params, x):
        params, opt, loss = learned(params, opt, x)
        new = optax.incremental_update(params, ema, 0.01)
        ema = new if mistake else jmp_scale.select_tree(opt.applied, new, ema)
        is_due = opt.applied & (opt.loss_scale.counter % 10 == 0)
        target = jmp_scale.select_tree(is_due, params, target)
        return form((target, opt, ema, params, loss))

    return step, (PARAMS, TX.init(PARAMS), PARAMS, PARAMS, X)


def by_its_name(results):
    return dict(zip(("target", "opt", "ema", "params", "loss"), results, strict=True))


def equal_parts():
    """Two states that start equal, of which one learns less, and equal constants."""

    def half(params, x, constants):
        return HALF["float16"](params, jnp.sqrt(1 - constants["used"]) * x)

    @jax.jit
    def step(params, opt, others, state, x, constants):
        first = learned(params, opt, x, constants, half=half)
        return *first[:2], *learned(others, state, x / 2, constants, half=half)

    rows = dict.fromkeys(("also", "used"), jnp.linspace(0.99, 0, 16)[:, None])
    return step, (PARAMS, TX.init(PARAMS), OTHERS, TX.init(OTHERS), X, rows)


def records():
    """S, losses and norms of the last eight steps, NaN and infinite ones too."""

    @jax.jit
    def step(state, history, x):
        loss, grads = scaled(HALF["float16"], state["opt"].loss_scale, state["p"], x)
        params, opt = applied(state["p"], state["opt"], loss, grads)
        new = {"S": opt.loss_scale.loss_scale, "of g": optax.tree.norm(grads), "": loss}
        rows = {k: state[k].at[state["i"] % 8].set(new[k]) for k in new}
        rows["rolled"] = jnp.roll(state["rolled"], 1).at[0].set(new["S"])
        history = history.push(state["opt"], opt, loss=loss)
        return {"p": params, "opt": opt, "i": state["i"] + 1, **rows}, history

    state = dict.fromkeys(("S", "of g", "", "rolled"), jnp.zeros(8))
    state |= {"p": PARAMS, "opt": TX.init(PARAMS), "i": jnp.int32(0)}
    return step, (state, jmp_scale.diagnostics.LossScaleHistory.create(10), X)


def accumulated(params, ls, x):
    def add(total, x):
        found = scaled(HALF["float16"], ls, params, x)
        return jax.tree.map(lambda a, b: a + b / 4, total, found), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    return lax.scan(add, zeros, x.reshape(4, 4, 4))[0]


def window_of_calls(mistake=None):
    """Gradients are summed over four calls, and applied in the last one."""

    @jax.jit
    def step(carry, x):
        params, opt, total, calls = carry
        loss, grads = scaled(HALF["float16"], opt.loss_scale, params, x)
        total, calls = jax.tree.map(jnp.add, total, grads), calls + 1

        def ends(_):
            mean = jax.tree.map(lambda g: g / 4, total)
            zero = jax.tree.map(jnp.zeros_like, total)
            rest = jax.tree.map(jnp.multiply, total, zero) if mistake else zero
            return *applied(params, opt, None, mean), rest, 0 * calls

        def goes_on(_):
            return params, opt, total, calls

        return lax.cond(calls == 4, ends, goes_on, None), loss

    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    return step, ((PARAMS, TX.init(PARAMS), zeros, jnp.int32(0)), X)


def now_and_then(mistake=None, calls=0):
    """A second optimizer that steps in each fifth call, counted by a bare argument."""

    @jax.jit
    def step(params, opt, others, state, calls, x):
        def other(_):
            new, opt, _ = learned(others, state, x)
            return new, state if mistake else opt

        both = lax.cond(calls % 5 == 4, other, lambda _: (others, state), None)
        return *learned(params, opt, x)[:2], *both, calls + 1

    return step, (PARAMS, TX.init(PARAMS), OTHERS, TX.init(OTHERS), jnp.int32(calls), X)


def with_arguments(mistake=None):
    """A learning rate, a mask, a frozen base and an epoch as arguments."""

    @jax.jit
    def step(state, batch, rate, frozen, epoch):
        def loss_of(params, x, mask):
            y = jax.nn.gelu(x @ (frozen["w1"] + params["w1"])) @ params["w2"]
            mean = 1 + state["total"] if mistake == "mean" else 1
            return jnp.sum(mask * (y - target(x)) ** 2) / jnp.sum(mask) / mean

        half, opt = jmp_scale.autocast(loss_of, "float16"), state["opt"]
        loss, grads = scaled(half, opt.loss_scale, state["params"], *batch)
        updates, opt = TX.update(grads, opt, state["params"], value=loss)
        updates = jax.tree.map(lambda u: rate * u, updates)
        params = optax.apply_updates(state["params"], updates)
        total = 0.9 * state["total"] + 0.1 * loss  # for a log: NaN may stay in it
        new = {"params": params, "opt": opt, "total": total, "seen": state["seen"]}
        new["seen"] += jnp.int32(1)
        if mistake == "decay":
            new["params"] = jax.tree.map(lambda p: p - 1e-4 * rate * p, params)
        return new, frozen, {"loss": loss, "epoch": epoch}

    zero = {"total": jnp.float32(0), "seen": jnp.int32(0)}
    state = {"params": PARAMS, "opt": TX.init(PARAMS), **zero}
    batch = X, jnp.ones((16, 1))
    return step, (state, batch, jnp.float32(0.5), {"w1": 1.1 * PARAMS["w1"]}, 3)


def loop_by_hand(mistake=None, ls="dynamic"):
    """No with_loss_scale: a loss scale, a select, and Optax."""

    @jax.jit
    def step(params, opt, ls, x):
        loss, grads = scaled(HALF["float16"], ls, params, x)
        grads = ls.unscale(grads) if mistake == "twice" else grads
        w2 = grads["w2"]
        seen = {"loss": loss, "NaN alone": jnp.where(jnp.isinf(w2), 0, w2)}
        seen = seen.get(mistake, grads)
        finite = jmp_scale.all_finite(seen)
        if mistake == "zero":  # momentum moves on
            grads = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
        updates, new = ADAMW.update(grads, opt, params)
        updated = optax.apply_updates(params, updates), new
        if mistake not in ("select", "zero"):
            updated = jmp_scale.select_tree(finite, updated, (params, opt))
        adjusted = {
            "adjust": ls,
            "anew": DYNAMIC,
            "flag": ls.adjust(jmp_scale.all_finite(loss)),
            "branch": jmp_scale.select_tree(finite, ls.adjust(True), ls),
        }
        return *updated, adjusted.get(mistake, ls.adjust(finite)), loss

    return step, (PARAMS, ADAMW.init(PARAMS), LOSS_SCALES[ls], X)


def gan(mistake=None):
    """Two players, each with an optimizer and an S."""

    @jax.jit
    def step(players, states, x):
        scales = [state.loss_scale for state in states]
        scales = scales[::-1] if mistake == "swapped" else scales
        new = []
        for player, state, ls in zip(players, states, scales, strict=True):
            loss, grads = scaled(HALF["float16"], ls, player, x)
            if mistake == "unscaled by the first":
                grads = scales[0].unscale(ls.scale(grads))
            new.append(applied(player, state, loss, grads))
        return *zip(*new, strict=True), loss

    players = PARAMS, OTHERS
    return step, (players, tuple(map(TX.init, players)), X)


def one_player_in_float32(mistake=None):
    """A critic with S, and a generator with a plain optimizer that sees it.

    Of their states as arguments side by side none is a chain.
    """

    @jax.jit
    def step(params, state, other, opt, x):
        ls = state.loss_scale if mistake else LOSS_SCALES["none"]
        params, state, loss = learned(params, state, x)
        both = functools.partial(loss_fn, params)
        _, grads = by_hand(lambda p, x: loss_fn(p, x) * both(x), ls, other, x)
        updates, opt = ADAM.update(grads, opt)
        other = optax.apply_updates(other, optax.tree.scale(-1e-3, updates))
        return params, state, other, opt, loss

    return step, (PARAMS, TX.init(PARAMS), OTHERS, ADAM.init(OTHERS), X)


def ensemble():
    """Members of a vmap over seeds, which skip for themselves."""
    members = jax.tree.map(lambda p: jnp.stack([p, 0.9 * p]), PARAMS)
    args = members, jax.vmap(TX.init)(members), jnp.stack([X, X + 1])
    return jax.jit(jax.vmap(learned)), args


def several_steps_in_a_call(change=nothing):
    step, (params, state, _) = step_of(change=change)

    def one(carry, x):
        *carry, loss = step(*carry, x)
        return tuple(carry), loss

    run = jax.jit(lambda carry, xs: lax.scan(one, carry, xs), donate_argnums=0)
    return run, ((params, state), jnp.stack([X, X + 1, X + 2]))


# Frameworks.


def nnx_step(mistake=None, change=nothing, with_metrics=False):
    layers = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1))
    model = nnx.Sequential(*layers, nnx.Linear(8, 2, rngs=nnx.Rngs(2)))
    optimizer = jmp_scale.nnx.Optimizer(model, ADAMW, loss_scale=DYNAMIC)

    def loss_of(model, x):
        return jnp.mean((model(x) - target(x)) ** 2)

    @nnx.jit
    def step(model, optimizer, x):
        half = jmp_scale.nnx.autocast(loss_of, "float16")
        ls = optimizer.loss_scale
        takes = {
            "plain": nnx.value_and_grad(half),
            "own gradient": nnx.value_and_grad(lambda *args: ls.scale(half(*args))),
        }
        loss, grads = takes.get(mistake, optimizer.value_and_grad(half))(model, x)
        if mistake == "own gradient":
            loss, grads = ls.unscale((loss, grads))
        grads = change(grads, ls, model)
        if mistake != "no update":
            optimizer.update(model, grads, value=loss)
        return loss

    if not with_metrics:
        return step, (model, optimizer, X)
    # As in Flax's tutorial: a mean for the log among the arguments, of all calls.
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @nnx.jit
    def logged(model, optimizer, metrics, x):
        metrics.update(loss=step(model, optimizer, x))

    return logged, (model, optimizer, metrics, X)


# Devices.


def pmapped(mistake=None):
    def step(params, state, key, x):
        x = x + 1e-3 * jax.random.normal(key, x.shape)
        loss, grads = scaled(HALF["float16"], state.loss_scale, params, x)
        if not mistake:
            loss, grads = lax.pmean((loss, grads), "batch")
        return *applied(params, state, loss, grads), loss

    params = jax.tree.map(lambda p: jnp.stack([p] * 2), PARAMS)
    params, state = jax.pmap(lambda p: (p, TX.init(p)), "batch")(params)
    step = jax.pmap(step, "batch", donate_argnums=(0, 1))
    return step, (params, state, jax.random.split(KEY, 2), X.reshape(2, 8, 4))


def split_parameters(mistake=None):
    """Half of the hidden layer is on each device; an overflow is one of both."""
    axes = "data" if mistake else ("data", "model")
    tx = jmp_scale.with_loss_scale(ADAMW, DYNAMIC, axis_name=axes)

    def step(params, state, x):
        loss, grads = scaled(HALF["float16"], state.loss_scale, params, x)
        return *applied(params, state, lax.pmean(loss, "model"), grads, tx), loss

    split = {(4, 16): P(None, "model"), (16, 2): P("model")}
    args = PARAMS, tx.init(PARAMS), X
    types = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=types)
    specs = jax.tree.map(lambda leaf: split.get(leaf.shape, P()), args)
    step = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(*specs[:2], P()), check_vma=False
    )
    return jax.jit(step), args


def memory(mistake=None, place=2, form=tuple):
    """The (c, h) of an LSTM comes back, and goes into the next step."""

    def loss_of(params, memory, x):
        h = jnp.tanh(x @ params["w1"] + memory[1])
        c = 0.9 * memory[0] + 0.1 * h
        return jnp.mean((c @ params["w2"] - target(x)) ** 2), form((c, h))

    @jax.jit
    def step(*args):
        *args, old = *args[:place], *args[place + 1 :], args[place]
        params, opt, x = args
        half = jmp_scale.autocast(loss_of, "float16")
        take = jmp_scale.value_and_grad(half, opt.loss_scale, has_aux=True)
        (loss, new), grads = take(params, old, x)
        params, opt = applied(params, opt, loss, grads)
        new = new if mistake else jmp_scale.select_tree(opt.applied, new, old)
        results = [params, opt, loss]
        results.insert(place, new)
        return tuple(results)

    args = [PARAMS, TX.init(PARAMS), X]
    args.insert(place, form((jnp.zeros((16, 16)), jnp.zeros((16, 16)))))
    return step, tuple(args)


def pairs():
    """Two batches go in, and two predictions of their shapes come back."""

    def loss_of(params, x, y):
        a, b = (jnp.tanh(z @ params["w"]) for z in (x, y))
        return jnp.mean((a - y) ** 2 + (b - x) ** 2), (a, b)

    @jax.jit
    def step(params, opt, batch):
        half = jmp_scale.autocast(loss_of, "float16")
        take = jmp_scale.value_and_grad(half, opt.loss_scale, has_aux=True)
        (loss, other), grads = take(params, *batch)
        return *applied(params, opt, loss, grads), other, loss

    params = {"w": jnp.eye(4) / 2}
    return step, (params, TX.init(params), (X, X[::-1]))


def in_another_order():
    @jax.jit
    def step(state, x, params):
        old, (params, state, loss) = params, learned(params, state, x)
        logs = {"loss": loss, "S": state.loss_scale.loss_scale}
        # These have the names and shapes of the parameters, and come first.
        return jax.tree.map(jnp.subtract, params, old), logs, (state, params)

    return step, (TX.init(PARAMS), X, PARAMS)


def no_loss_scale():
    @jax.jit
    def step(params, opt, x):
        loss, grads = jax.value_and_grad(HALF["bfloat16"])(params, x)
        updates, opt = ADAMW.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    return step, (PARAMS, ADAMW.init(PARAMS), X)


def cases(maker, **settings):
    """Steps by names that say what is unusual in them: one for each value of a list."""
    lists = [each if isinstance(each, list) else [each] for each in settings.values()]
    found = {}
    for values in itertools.product(*lists):
        names = [getattr(value, "__name__", str(value)) for value in values]
        given = dict(zip(settings, values, strict=True))
        found[", ".join([maker.__name__, *names])] = functools.partial(maker, **given)
    return found


# By rule, the steps with that mistake.
WRONG = {
    "never unscaled": {
        **cases(step_of, gradients=never_unscaled),
        **cases(step_of, change=one_left_scaled, inner="clip"),
        **cases(step_of, change=others_added_scaled),
        **cases(gan, mistake="unscaled by the first"),
        # A clip does not hide that S changes a step.
        **cases(step_of, gradients=never_unscaled, inner="clip", times=1e3),
        **cases(step_of, gradients=never_unscaled, inner="sgd", dtype="float32"),
    },
    "unscaled twice": {
        # Nor do moments of earlier steps, or a weight decay.
        **cases(step_of, change=unscaled_twice, inner=["decay", "warm-up", "trace"]),
        **cases(step_of, change=unscaled_twice, inside="MultiSteps", inner="sgd"),
        **cases(step_of, change=[unscaled_twice, one_unscaled_twice]),
        **cases(step_of, gradients=penalty_unscaled),
        **cases(step_of, change=unscaled_twice, ls="static", dtype="bfloat16"),
        **cases(step_of, change=unscaled_twice, inner=["sgd", "clip"]),
        **cases(average, change=unscaled_twice, accumulate=True),
        **cases(several_steps_in_a_call, change=unscaled_twice),
        **cases(nnx_step, change=unscaled_twice),
        **cases(loop_by_hand, mistake="twice"),
    },
    "S not used": {
        **cases(step_of, gradients=[plain, captured]),
        **cases(step_of, gradients=plain, ls="static", dtype="bfloat16"),
        **cases(step_of, gradients=[plain, captured], inner="sgd"),
        **cases(nnx_step, mistake="plain"),
        **cases(gan, mistake="swapped"),
    },
    "clipped while scaled": {
        **cases(step_of, gradients=CLIPS),
        **cases(step_of, gradients=CLIPS, inner="sgd", dtype="float32"),
    },
    "captured parameters": {
        **cases(step_of, gradients=captured_parameters),
        **cases(step_of, gradients=captured_parameters, ls="none", dtype="bfloat16"),
    },
    "unscaled by the next S": cases(step_of, gradients=unscaled_by_the_next_s),
    "reported scaled": {
        **cases(step_of, gradients=loss_left_scaled),
        **cases(step_of, gradients=loss_left_scaled, guard=GUARD),
    },
    "overflow hidden": {
        **cases(step_of, change=clipped),
        **cases(step_of, around=["zero_nans", "entries"]),
        **cases(step_of, gradients=NO_NAN),
        **cases(loop_by_hand, mistake=["flag", "NaN alone"]),
        **cases(step_of, change=clipped, inner="sgd"),
    },
    "state put back": {
        **cases(step_of, around="apply_if_finite"),
        **cases(loop_by_hand, mistake="branch"),
    },
    "skipped alone": cases(split_parameters, mistake="over one axis"),
    "changed on a skip": {
        **cases(step_of, results=[decayed, put_back]),
        **cases(step_of, results=decayed, ls="none"),
        **cases(average, select_by=None),
        **cases(average, select_by=None, inner="warm-up"),
        **cases(average, select_by="grads_finite", guard=GUARD),  # but not of spikes
        **cases(copies, mistake="not selected"),
        **cases(loop_by_hand, mistake="zero"),
        **cases(with_arguments, mistake="decay"),
    },
    "NaN stays": {
        **cases(loop_by_hand, mistake=["select", "loss"]),
        **cases(step_of, around="MultiSteps"),
        **cases(one_player_in_float32, mistake="no skip"),
        **cases(window_of_calls, mistake="keeps NaN"),
        **cases(average, select_by=None),
        **cases(nnx_step, mistake="own gradient"),
        **cases(with_arguments, mistake="mean"),
        **cases(memory, mistake="not selected", place=[2, 1, 0], form=[tuple, list]),
    },
    "S never adjusted": {
        **cases(step_of, results=[old_state, state_anew]),
        **cases(nnx_step, mistake="no update"),
        **cases(loop_by_hand, mistake=["adjust", "anew"]),
        **cases(now_and_then, mistake="old state", calls=4),
    },
    "S adjusted twice": cases(step_of, results=adjusted_twice),
    "replicas diverge": cases(pmapped, mistake="no mean"),
    "nothing learned": cases(step_of, results=old_parameters),
    "not returned": cases(step_of, results=not_all_of_it),
    "comes back in half precision": cases(step_of, results=narrowed),
    "guard without a loss": {
        **cases(step_of, with_value=False, guard=GUARD),
        **cases(step_of, with_value=False, guard=GUARD, ls="none", dtype="bfloat16"),
    },
}
RIGHT = {
    **cases(step_of),
    **cases(step_of, guard=GUARD),
    **cases(step_of, inner="plateau"),
    **cases(step_of, ls="none", dtype="bfloat16"),
    **cases(step_of, gradients=by_hand),
    **cases(step_of, results=normalized),
    **cases(average),
    **cases(average, donate=True),
    **cases(loop_by_hand, ls="static"),
    **cases(nnx_step, with_metrics=True),
    **cases(no_loss_scale),
    **cases(in_another_order),
    **cases(equal_parts),
    **cases(copies, form=by_its_name),
    **cases(records),
    **cases(now_and_then, calls=[0, 4]),
    **cases(pairs),
    **cases(ensemble),
    **cases(several_steps_in_a_call),
    **cases(step_of, inner=["adamw", "sgd", "clip"], dtype=[*HALF]),
}
MISTAKES = {"gradients", "change", "results", "with_value", "select_by", "mistake"}


def cured(step):
    """The step without its mistake; what stands around `with_loss_scale` is inside."""
    kept = {key: x for key, x in step.keywords.items() if key not in MISTAKES}
    if "around" in kept:
        kept["inside"] = kept.pop("around")
    return cases(step.func, **kept)


# The rules whose cure makes a right step, by its name.
CURED: dict[str, set[str]] = {}
for _rule, _steps in WRONG.items():
    for _step in _steps.values():
        ((_name, _cured),) = cured(_step).items()
        RIGHT.setdefault(_name, _cured)
        CURED.setdefault(_name, set()).add(_rule)
