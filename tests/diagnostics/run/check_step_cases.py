"""Train steps with one mistake each, and right ones beside them, for `check_step`.

A step is a maker and its settings; it returns (step, arguments). `WRONG` names the rule
that must find a step, `RIGHT` has the steps that must be clean, and `cured` applies the
cure of the rule to the settings of a wrong one.
"""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_scale
import jmp_scale.nnx
from jmp_scale.linen import TrainState

DYNAMIC = jmp_scale.DynamicLossScale()
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "w1": jax.random.normal(KEYS[0], (4, 16)) / 2,
    "w2": jax.random.normal(KEYS[1], (16, 2)) / 4,
}
W = jax.random.normal(KEYS[2], (4, 2)) / 2
X = jax.random.normal(KEYS[3], (16, 4))
IDS = jnp.arange(16).reshape(4, 4) % 8


def loss_fn(params, x):
    return jnp.mean((jax.nn.gelu(x @ params["w1"]) @ params["w2"] - target(x)) ** 2)


def target(x):
    return jnp.tanh(x @ W)


HALF = {d: jmp_scale.autocast(loss_fn, d) for d in ("float16", "bfloat16")}
HALF["float32"] = loss_fn
INNER = {
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
}
DECAY = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2))
ADAMW = INNER["adamw"]
TX = jmp_scale.with_loss_scale(ADAMW, DYNAMIC)
STATIC = jmp_scale.StaticLossScale(2.0**10)
NOOP = jmp_scale.NoOpLossScale()
GUARD = jmp_scale.SpikeGuard()
GUARDED = jmp_scale.with_loss_scale(ADAMW, DYNAMIC, guard=GUARD)
WARM_UP = optax.adamw(optax.linear_schedule(0.0, 1e-2, 10))
WARMED_UP = jmp_scale.with_loss_scale(WARM_UP, DYNAMIC)


# How a step takes its loss and gradients.


def scaled(half, ls, *args):
    return jmp_scale.value_and_grad(half, ls)(*args)


def never(half, ls, *args):
    return jax.value_and_grad(lambda *args: ls.scale(half(*args)))(*args)


def never_but_reported(half, ls, *args):
    loss, grads = never(half, ls, *args)
    return loss / ls.loss_scale, grads


def by_hand(half, ls, *args):
    return ls.unscale(never(half, ls, *args))


def plain(half, ls, *args):
    return jax.value_and_grad(half)(*args)


def captured(half, ls, *args):
    return jmp_scale.value_and_grad(half, DYNAMIC)(*args)


def fresh(half, ls, *args):
    return jmp_scale.value_and_grad(half, jmp_scale.DynamicLossScale())(*args)


def loss_left_scaled(half, ls, *args):
    loss, grads = never(half, ls, *args)
    return loss, ls.unscale(grads)


def scaled_twice(half, ls, *args):
    return jmp_scale.value_and_grad(lambda *args: ls.scale(half(*args)), ls)(*args)


def by_next_s(half, ls, *args):
    loss, grads = never(half, ls, *args)
    ls = ls.adjust(jmp_scale.all_finite(grads))
    return loss / ls.loss_scale, ls.unscale(grads)


def penalty_unscaled(half, ls, *args):
    loss, grads = never(half, ls, *args)
    grads = jax.tree.map(lambda g, p: g + 1e-1 * p, grads, args[0])
    return ls.unscale((loss, grads))


def clipped_while_scaled(half, ls, *args):
    loss, grads = never(half, ls, *args)
    grads = jax.tree.map(lambda g: jnp.clip(jnp.nan_to_num(g), -6e4, 6e4), grads)
    return ls.unscale((loss, grads))


# What a step does with its gradients, and with what the optimizer returns.


def same(grads, ls, params):
    return grads


def unscaled(grads, ls, params):
    return ls.unscale(grads)


def one_unscaled(grads, ls, params):
    return {**grads, "w1": ls.unscale(grads["w1"])}


def clipped(grads, ls, params):
    return jax.tree.map(lambda g: jnp.clip(jnp.nan_to_num(g), -1, 1), grads)


def others_added_scaled(grads, ls, params):
    return jax.tree.map(jnp.add, ls.scale(jax.grad(loss_fn)(params, X)), grads)


def penalty_scaled(grads, ls, params):
    return jax.tree.map(lambda g, p: g + ls.scale(1e-3 * p), grads, params)


def penalized(grads, ls, params):
    return jax.tree.map(lambda g, p: g + 1e-1 * p, grads, params)


def returned(params, updates, state, new, loss):
    return optax.apply_updates(params, updates), new, loss


def decayed(params, updates, state, new, loss):
    params = jax.tree.map(lambda p: p * 0.999, params)
    return optax.apply_updates(params, updates), new, loss


def narrowed(params, updates, state, new, loss):
    params = optax.apply_updates(params, updates)
    return {**params, "w1": params["w1"].astype(jnp.float16)}, new, loss


def state_not_returned(params, updates, state, new, loss):
    return optax.apply_updates(params, updates), loss


def old_state(params, updates, state, new, loss):
    return optax.apply_updates(params, updates), state, loss


def old_params(params, updates, state, new, loss):
    return params, new, loss


def adjusted_again(params, updates, state, new, loss):
    finite = new.grads_finite
    new = new._replace(loss_scale=new.loss_scale.adjust(finite))
    return optax.apply_updates(params, updates), new, loss


def anew(params, updates, state, new, loss):
    return optax.apply_updates(params, updates), TX.init(params), loss


def step_of(
    inner=ADAMW,
    take=scaled,
    change=same,
    finish=returned,
    around=None,
    inside=None,
    ls=DYNAMIC,
    dtype="float16",
    times=1.0,
    with_value=True,
    donate=(),
    **options,
):
    """A step on Optax by hand, with mistakes in the places given."""
    inner = inside(inner) if inside else inner
    tx = jmp_scale.with_loss_scale(inner, ls, **options)
    tx = around(tx) if around else tx
    with_value = with_value and not around

    def half(*args):
        return times * HALF[dtype](*args)

    @functools.partial(jax.jit, donate_argnums=donate)
    def step(params, state, x):
        loss, grads = take(half, scale_in(state), params, x)
        grads = change(grads, scale_in(state), params)
        value = {"value": loss} if with_value else {}
        updates, new = tx.update(grads, state, params, **value)
        return finish(params, updates, state, new, loss)

    return step, (PARAMS, tx.init(PARAMS), X)


def scale_in(state):
    def is_scale(path, value):
        return isinstance(value, jmp_scale.LossScale)

    return optax.tree.get(state, "loss_scale", filtering=is_scale)


# Wrappers of optimizers, for around with_loss_scale and within.


def multi_steps(tx, k=4):
    return optax.MultiSteps(tx, k).gradient_transformation()


def multi_steps_of_one(tx):
    return multi_steps(tx, k=1)


def if_finite(tx):
    return optax.apply_if_finite(tx, 5)


def clip(tx):
    return optax.chain(optax.clip(1.0), tx)


def norm_clip(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def zero_nans(tx):
    return optax.chain(optax.zero_nans(), tx)


# Steps with an average, keys, windows and half-precision parameters.


def average(keep="applied", tx=TX, accumulate=None, dtype=jnp.float32, donate=False):
    def step(state, x, key):
        params, old, ema = state["params"], state["opt"], state["ema"]
        x = x + 1e-3 * jax.random.normal(key, x.shape)
        if accumulate:
            loss, grads = accumulated(params, old.loss_scale, x)
            if accumulate == "unscaled after":
                grads = old.loss_scale.unscale(grads)
        else:
            loss, grads = scaled(HALF["float16"], old.loss_scale, params, x)
        updates, new = tx.update(grads, old, params, value=loss)
        params = optax.apply_updates(params, updates)
        moved = jax.tree.map(
            lambda e, p: 0.9 * e + 0.1 * p.astype(e.dtype), ema, params
        )
        if keep:
            moved = jmp_scale.select_tree(getattr(new, keep), moved, ema)
        metrics = {"loss": loss, **jmp_scale.diagnostics.metrics(new, grads)}
        return {"params": params, "opt": new, "ema": moved}, metrics

    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    ema = jax.tree.map(lambda p: 1.1 * p, PARAMS)
    state = {"params": params, "opt": tx.init(params), "ema": ema}
    step = jax.jit(step, donate_argnums=0 if donate else ())
    return step, (state, X, jax.random.key(1))


def accumulated(params, ls, x):
    def add(total, x):
        found = scaled(HALF["float16"], ls, params, x)
        return jax.tree.map(lambda a, b: a + b / 4, total, found), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    return lax.scan(add, zeros, x.reshape(4, 4, 4))[0]


def key_in_state(mistake=None):
    """A donated state with a typed key; `mistake`: NaN of a batch enters an average."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        params, opt, key, mean = state
        key, now = jax.random.split(key)
        noisy = x + 1e-3 * jax.random.normal(now, x.shape)
        loss, grads = scaled(HALF["float16"], opt.loss_scale, params, noisy)
        updates, opt = TX.update(grads, opt, params, value=loss)
        new = 0.9 * mean + 0.1 * x.mean(0)
        mean = new if mistake else jmp_scale.select_tree(opt.applied, new, mean)
        return (optax.apply_updates(params, updates), opt, key, mean), loss

    return step, ((PARAMS, TX.init(PARAMS), jax.random.key(2), jnp.zeros(4)), X)


def window_of_calls(mistake=False):
    """Gradients are summed over four calls, and applied in the last one."""

    @jax.jit
    def step(carry, x):
        params, opt, total, calls = carry
        loss, grads = scaled(HALF["float16"], opt.loss_scale, params, x)
        total, calls = jax.tree.map(jnp.add, total, grads), calls + 1

        def ends(_):
            mean = jax.tree.map(lambda g: g / 4, total)
            updates, new = TX.update(mean, opt, params)
            rest = jax.tree.map(
                lambda g: g * 0 if mistake else jnp.zeros_like(g), total
            )
            return optax.apply_updates(params, updates), new, rest, 0 * calls

        def goes_on(_):
            return params, opt, total, calls

        return lax.cond(calls == 4, ends, goes_on, None), loss

    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    return step, ((PARAMS, TX.init(PARAMS), zeros, jnp.int32(0)), X)


def with_arguments(mistake=False):
    """A learning rate, a mask, a frozen base and an epoch as arguments."""

    @jax.jit
    def step(state, batch, rate, frozen, epoch):
        def loss_of(params, x, mask):
            y = jax.nn.gelu(x @ (frozen["w1"] + params["w1"])) @ params["w2"]
            return jnp.sum(mask * (y - target(x)) ** 2) / jnp.sum(mask)

        half, opt = jmp_scale.autocast(loss_of, "float16"), state["opt"]
        loss, grads = scaled(half, opt.loss_scale, state["params"], *batch)
        updates, opt = TX.update(grads, opt, state["params"], value=loss)
        updates = jax.tree.map(lambda u: rate * u, updates)
        params = optax.apply_updates(state["params"], updates)
        total = state["total"] + loss
        new = {"params": params, "opt": opt, "total": total, "seen": state["seen"] + 1}
        if mistake:
            new["params"] = jax.tree.map(lambda p: p - 1e-4 * rate * p, params)
        return new, frozen, {"loss": loss, "epoch": epoch}

    zero = {"total": jnp.float32(0), "seen": jnp.int32(0)}
    state = {"params": PARAMS, "opt": TX.init(PARAMS), **zero}
    batch = X, jnp.ones((16, 1))
    return step, (state, batch, jnp.float32(0.5), {"w1": 1.1 * PARAMS["w1"]}, 3)


def loop_by_hand(mistake=None):
    """No with_loss_scale: a loss scale, a select, and Optax."""

    @jax.jit
    def step(params, opt, ls, x):
        loss, grads = scaled(
            HALF["float16"], DYNAMIC if mistake == "S" else ls, params, x
        )
        finite = jmp_scale.all_finite(loss if mistake == "loss" else grads)
        if mistake == "zero":  # momentum moves on
            grads = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
        updates, new = ADAMW.update(grads, opt, params)
        updated = optax.apply_updates(params, updates), new
        if mistake not in ("select", "zero"):
            updated = jmp_scale.select_tree(finite, updated, (params, opt))
        ls = ls if mistake == "adjust" else ls.adjust(finite)
        return *updated, ls, loss

    return step, (PARAMS, ADAMW.init(PARAMS), DYNAMIC, X)


def weighted(weight, params, x):
    return weight * HALF["float16"](params, x)


def loss_scales_by_name():
    tx = jmp_scale.with_loss_scale(ADAMW)

    @jax.jit
    def step(params, opt, scales, x):
        grads, finite = {}, {}
        for name, s in scales.items():
            weight = 1.0 if name == "mean" else 1e-6
            loss = functools.partial(weighted, weight)
            grads[name] = jmp_scale.grad(loss, s)(params, x)
            finite[name] = jmp_scale.all_finite(grads[name])
        scales = {name: s.adjust(finite[name]) for name, s in scales.items()}
        updates, opt = tx.update(jax.tree.map(jnp.add, *grads.values()), opt, params)
        return optax.apply_updates(params, updates), opt, scales

    return step, (PARAMS, tx.init(PARAMS), {"mean": DYNAMIC, "tiny": DYNAMIC}, X)


def gan(mistake=None):
    """Two players, each with an optimizer and an S."""

    @jax.jit
    def step(players, states, x):
        scales = [state.loss_scale for state in states]
        others = scales[::-1]
        scales = {"swapped": others, "one": scales[:1] * 2}.get(mistake, scales)
        new = []
        for player, state, ls, other in zip(
            players, states, scales, others, strict=True
        ):
            loss, grads = scaled(HALF["float16"], ls, player, x)
            if mistake == "unscaled by the other":
                grads = other.unscale(ls.scale(grads))
            updates, state = TX.update(grads, state, player, value=loss)
            new.append((optax.apply_updates(player, updates), state))
        return *zip(*new, strict=True), loss

    players = PARAMS, jax.tree.map(lambda p: 0.9 * p, PARAMS)
    return step, (players, tuple(map(TX.init, players)), X)


def one_player_in_float32(mistake=None):
    """A critic with S, and a generator with a plain optimizer that sees it."""

    @jax.jit
    def step(critic, generator, x):
        params, state = critic
        ls = state.loss_scale if mistake else jmp_scale.NoOpLossScale()
        loss, grads = scaled(HALF["float16"], state.loss_scale, params, x)
        updates, state = TX.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        other, opt = generator
        both = functools.partial(loss_fn, params)
        _, grads = by_hand(lambda p, x: loss_fn(p, x) * both(x), ls, other, x)
        updates, opt = ADAMW.update(grads, opt, other)
        return (params, state), (optax.apply_updates(other, updates), opt), loss

    other = jax.tree.map(lambda p: 0.9 * p, PARAMS)
    return step, ((PARAMS, TX.init(PARAMS)), (other, ADAMW.init(other)), X)


def ensemble():
    """Members of a vmap over seeds, which skip for themselves."""
    step, (params, _, x) = step_of()
    members = jax.tree.map(lambda p: jnp.stack([p, 0.9 * p, 0.8 * p]), params)
    x = jnp.stack([x, x + 1, x + 2])
    return jax.jit(jax.vmap(step)), (members, jax.vmap(TX.init)(members), x)


def several_steps_in_a_call():
    step, (params, state, x) = step_of()

    def one(carry, x):
        *carry, loss = step(*carry, x)
        return tuple(carry), loss

    run = jax.jit(lambda carry, xs: lax.scan(one, carry, xs), donate_argnums=0)
    return run, ((params, state), jnp.stack([x, x + 1, x + 2]))


# Frameworks.


class State(TrainState):
    batch_stats: Any


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))


def linen(mistake=None):
    model = Model()
    variables = model.init(jax.random.key(0), X)
    state = State.create(
        apply_fn=model.apply,
        **variables,
        tx=ADAMW,
        loss_scale=jmp_scale.DynamicLossScale(),
    )

    @functools.partial(jmp_scale.autocast, dtype="float16")
    def loss_of(params, stats, x):
        variables = {"params": params, "batch_stats": stats}
        y, new = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean((y - target(x)) ** 2), new["batch_stats"]

    def times_s(ls):
        def fun(*args):
            loss, stats = loss_of(*args)
            return ls.scale(loss), stats

        return fun

    @jax.jit
    def step(state, x):
        ls = state.loss_scale
        take = state.value_and_grad(loss_of, has_aux=True)
        if mistake in ("plain", "never"):
            fun = loss_of if mistake == "plain" else times_s(ls)
            take = jax.value_and_grad(fun, has_aux=True)
        (loss, stats), grads = take(state.params, state.batch_stats, x)
        if mistake == "unscaled twice":
            grads = ls.unscale(grads)
        if mistake == "clipped":
            grads = clipped(grads, ls, None)
        value = {} if mistake == "no value" else {"value": loss}
        if mistake == "replaced":
            new = state.apply_gradients(grads=grads, **value)
            return new.replace(batch_stats=stats), loss
        return state.apply_gradients(grads=grads, batch_stats=stats, **value), loss

    return step, (state, X)


def nnx_step(mistake=None, inner=ADAMW, plain=False):
    layers = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1))
    model = nnx.Sequential(*layers, nnx.Linear(8, 2, rngs=nnx.Rngs(2)))
    optimizer = jmp_scale.nnx.Optimizer(model, inner, loss_scale=DYNAMIC)
    if plain:
        optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)

    def loss_of(model, x):
        return jnp.mean((model(x) - target(x)) ** 2)

    @nnx.jit
    def step(model, optimizer, x):
        half = jmp_scale.nnx.autocast(loss_of, "bfloat16" if plain else "float16")
        if plain:
            loss, grads = nnx.value_and_grad(half)(model, x)
            optimizer.update(model, grads)
            return loss
        ls = optimizer.loss_scale
        take = optimizer.value_and_grad(half)
        if mistake == "plain":
            take = nnx.value_and_grad(half)
        if mistake in ("never", "own gradient"):
            take = nnx.value_and_grad(lambda *args: ls.scale(half(*args)))
        loss, grads = take(model, x)
        if mistake == "own gradient":
            loss, grads = ls.unscale((loss, grads))
        if mistake == "unscaled twice":
            grads = ls.unscale(grads)
        if mistake == "clipped":
            grads = jax.tree.map(jnp.nan_to_num, grads)
        if mistake != "no update":
            value = {} if mistake == "no value" else {"value": loss}
            optimizer.update(model, grads, **value)
        return loss

    return step, (model, optimizer, X)


def nnx_with_metrics():
    """As in Flax's tutorial: a mean for the log among the arguments, of all calls."""
    step, (model, optimizer, x) = nnx_step()
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @nnx.jit
    def with_metrics(model, optimizer, metrics, x):
        metrics.update(loss=step(model, optimizer, x))

    return with_metrics, (model, optimizer, metrics, x)


def equinox(mistake=None):
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))

    def loss_of(model, x):
        return jnp.mean((jax.vmap(model)(x) - target(x)) ** 2)

    half = jmp_scale.autocast(loss_of, "float16")

    @eqx.filter_jit
    def step(model, state, x):
        take = jmp_scale.value_and_grad(
            half, state.loss_scale, transform=eqx.filter_value_and_grad
        )
        take = eqx.filter_value_and_grad(half) if mistake == "plain" else take
        loss, grads = take(model, x)
        if mistake == "unscaled twice":
            grads = state.loss_scale.unscale(grads)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = TX.update(grads, state, params, value=loss)
        return eqx.apply_updates(model, updates), state, loss

    return step, (model, TX.init(eqx.filter(model, eqx.is_inexact_array)), X)


def haiku(mistake=False):
    def forward(x):
        return hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training=True)

    network = hk.without_apply_rng(hk.transform_with_state(forward))

    @functools.partial(jmp_scale.autocast, dtype="float16")
    def loss_of(params, state, x):
        y, state = network.apply(params, state, x)
        return jnp.mean((y - 1) ** 2), state

    @jax.jit
    def step(params, state, opt, x):
        take = jmp_scale.value_and_grad(loss_of, opt.loss_scale, has_aux=True)
        (loss, new), grads = take(params, state, x)
        updates, opt = TX.update(grads, opt, params, value=loss)
        state = new if mistake else jmp_scale.select_tree(opt.applied, new, state)
        return optax.apply_updates(params, updates), state, opt, loss

    params, state = network.init(jax.random.key(0), X)
    return step, (params, state, TX.init(params), X)


def embedding(mistake=False):
    """A batch of integers; `mistake`: an average that takes whatever the loss is."""

    @functools.partial(jmp_scale.autocast, dtype="float16")
    def loss_of(params, ids):
        logits = jnp.tanh(params["table"][ids[:, :-1]]) @ params["out"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        return losses.mean(), jnp.mean(logits, (0, 1))

    @jax.jit
    def step(params, opt, mean, ids):
        take = jmp_scale.value_and_grad(loss_of, opt.loss_scale, has_aux=True)
        (loss, logits), grads = take(params, ids)
        updates, opt = TX.update(grads, opt, params, value=loss)
        new = {"mean": 0.9 * mean["mean"] + 0.1 * logits}
        mean = new if mistake else jmp_scale.select_tree(opt.applied, new, mean)
        return optax.apply_updates(params, updates), opt, mean, loss

    table = jax.random.normal(KEYS[0], (8, 4))
    params = {"table": table, "out": table.T / 2}
    return step, (params, TX.init(params), {"mean": jnp.zeros(8)}, IDS)


# Devices.


def mesh_of(names=("data",), shape=(2,)):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def shard_mapped(mistake=None):
    def body(params, state, x):
        loss, grads = scaled(HALF["float16"], state.loss_scale, params, x)
        if mistake == "half sum":
            grads = jax.tree.map(lambda g: g.astype(jnp.float16), grads)
        if mistake not in ("no mean", "mean after"):
            grads = lax.pmean(grads, "data")
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = TX.update(grads, state, params, value=loss)
        if mistake == "mean after":
            updates = lax.pmean(updates, "data")
        return optax.apply_updates(params, updates), state, loss[None]

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P(), P("data"))}
    step = jax.jit(jax.shard_map(body, mesh=mesh_of(), check_vma=False, **specs))
    return step, (PARAMS, TX.init(PARAMS), X)


def split_over_two_axes(mistake=False):
    """Weights are split over one axis, the batch over the other."""
    axis = "data" if mistake else None
    tx = jmp_scale.with_loss_scale(ADAMW, DYNAMIC, axis_name=axis)

    def loss_of(params, x):
        hidden = jax.nn.gelu(x @ params["w1"])
        y = lax.psum(hidden @ params["w2"], "model")
        return jnp.mean((y - target(x)) ** 2)

    half = jmp_scale.autocast(loss_of, "float16")

    def body(params, state, x):
        loss, grads = scaled(half, state.loss_scale, params, x)
        loss, grads = lax.pmean((loss, grads), "data")
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    mesh = mesh_of(("data", "model"), (2, 2))
    split = {"w1": P(None, "model"), "w2": P("model")}
    state = jax.eval_shape(tx.init, PARAMS)
    in_state = jax.tree_util.tree_map_with_path(
        lambda path, x: split.get(getattr(path[-1], "key", None), P()), state
    )
    specs = (split, in_state, P("data"))
    out = (split, in_state, P())
    step = jax.shard_map(
        body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
    )

    def put(tree, specs):
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        return jax.device_put(tree, shardings)

    arguments = put(PARAMS, split), put(tx.init(PARAMS), in_state)
    return jax.jit(step), (*arguments, X)


def pmapped(mistake=False, donate=False):
    def step(params, state, key, x):
        x = x + 1e-3 * jax.random.normal(key, x.shape)
        loss, grads = scaled(HALF["float16"], state.loss_scale, params, x)
        if not mistake:
            loss, grads = lax.pmean((loss, grads), "batch")
        updates, state = TX.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    params = jax.tree.map(lambda p: jnp.stack([p] * 2), PARAMS)
    params, state = jax.pmap(lambda p: (p, TX.init(p)), "batch")(params)
    step = jax.pmap(step, "batch", donate_argnums=(0, 1) if donate else ())
    return step, (params, state, jax.random.split(KEYS[0], 2), X.reshape(2, 8, 4))


def sharded_jit():
    mesh = mesh_of()
    step, (params, _, x) = step_of(donate=(0, 1))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    state = jax.device_put(TX.init(params), NamedSharding(mesh, P()))
    return step, (params, state, jax.device_put(x, NamedSharding(mesh, P("data"))))


def in_another_order():
    step, (params, state, x) = step_of()

    def turned(state, x, params):
        params, state, loss = step(params, state, x)
        return {"loss": loss, "S": state.loss_scale.loss_scale}, (state, params)

    return turned, (state, x, params)


def no_loss_scale(dtype="bfloat16", tx=ADAMW):
    @jax.jit
    def step(params, opt, x):
        loss, grads = jax.value_and_grad(HALF[dtype])(params, x)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    return step, (PARAMS, tx.init(PARAMS), X)


# Which rule finds a mistake in a part of `step_of`.
_PARTS = {
    "take": {
        never: "never unscaled",
        never_but_reported: "never unscaled",
        scaled_twice: "never unscaled",
        plain: "S not used",
        captured: "S not used",
        fresh: "S not used",
        by_next_s: "unscaled by the next S",
        penalty_unscaled: "partly unscaled",
        loss_left_scaled: "value is scaled",
        clipped_while_scaled: "overflow hidden",
    },
    "change": {
        unscaled: "unscaled twice",
        one_unscaled: "unscaled twice",
        others_added_scaled: "never unscaled",
        penalty_scaled: "never unscaled",
        clipped: "overflow hidden",
    },
    "around": {
        multi_steps: "overflow stays",
        multi_steps_of_one: "overflow stays",
        if_finite: "state put back",
        clip: "not outermost",
        norm_clip: "not outermost",
        zero_nans: "overflow hidden",
    },
    "finish": {
        decayed: "changed on a skip",
        old_state: "S never adjusted",
        anew: "S never adjusted",
        adjusted_again: "S adjusted twice",
        old_params: "nothing learned",
        state_not_returned: "not returned",
        narrowed: "compiles twice",
    },
}
_WITH_EACH_OPTIMIZER = {never, unscaled, plain, captured, fresh, clipped, if_finite}
# Which rule finds a mistake of another maker.
_MISTAKES = {
    linen: {
        "plain": "S not used",
        "never": "never unscaled",
        "unscaled twice": "unscaled twice",
        "clipped": "overflow hidden",
        "replaced": "NaN stays",
        "no value": "no value",
    },
    nnx_step: {
        "plain": "S not used",
        "never": "never unscaled",
        "unscaled twice": "unscaled twice",
        "clipped": "overflow hidden",
        "own gradient": "NaN stays",
        "no update": "S never adjusted",
        "no value": "no value",
    },
    equinox: {"plain": "S not used", "unscaled twice": "unscaled twice"},
    haiku: {"stats not selected": "NaN stays"},
    gan: {
        "swapped": "another S",
        "one": "S not used",
        "unscaled by the other": "another S",
    },
    one_player_in_float32: {"no skip": "overflow stays"},
    loop_by_hand: {
        "loss": "overflow stays",
        "select": "overflow stays",
        "zero": "changed on a skip",
        "S": "S not used",
        "adjust": "S never adjusted",
    },
    embedding: {"NaN in an average": "NaN stays"},
    key_in_state: {"NaN in an average": "NaN stays"},
    window_of_calls: {"keeps NaN": "overflow stays"},
    with_arguments: {"decay": "changed on a skip"},
    shard_mapped: {
        "no mean": "replicas diverge",
        "mean after": "replicas diverge",
        "half sum": "half-precision sum",
    },
    split_over_two_axes: {"one axis": "skip not agreed"},
    pmapped: {"no mean": "replicas diverge"},
}
# Mistakes that meet other settings.
_MORE = {
    "no value": ("no value", step_of, {"with_value": False}),
    "plain, bfloat16": ("S not used", step_of, {"take": plain, "dtype": "bfloat16"}),
    "plain, float32": ("S not used", step_of, {"take": plain, "dtype": "float32"}),
    "never, float32": ("never unscaled", step_of, {"take": never, "dtype": "float32"}),
    "unscaled, bfloat16": (
        "unscaled twice",
        step_of,
        {"change": unscaled, "dtype": "bfloat16"},
    ),
    "unscaled, static": ("unscaled twice", step_of, {"change": unscaled, "ls": STATIC}),
    "plain, static": ("S not used", step_of, {"take": plain, "ls": STATIC}),
    "decayed, no S": ("changed on a skip", step_of, {"finish": decayed, "ls": NOOP}),
    # Neither clip nor gradients of the steps before hide that S changes a step.
    "never, large gradients": (
        "never unscaled",
        step_of,
        {"take": never, "inner": INNER["clip"], "times": 1e3},
    ),
    "penalty_unscaled, sgd": (
        "partly unscaled",
        step_of,
        {"take": penalty_unscaled, "inner": INNER["sgd"]},
    ),
    "unscaled, a warm-up": (
        "unscaled twice",
        step_of,
        {"change": unscaled, "inner": WARM_UP},
    ),
    "unscaled, sgd with decay": (
        "unscaled twice",
        step_of,
        {"change": unscaled, "inner": DECAY},
    ),
    "adjusted again, sgd": (
        "S adjusted twice",
        step_of,
        {"finish": adjusted_again, "inner": INNER["sgd"]},
    ),
    "an average": ("changed on a skip", average, {"keep": None}),
    "an average in a warm-up": (
        "changed on a skip",
        average,
        {"keep": None, "tx": WARMED_UP},
    ),
    "an average of spikes": (
        "changed on a spike",
        average,
        {"keep": "grads_finite", "tx": GUARDED},
    ),
    "unscaled after a window": (
        "unscaled twice",
        average,
        {"accumulate": "unscaled after"},
    ),
    "nnx_step, unscaled twice, sgd": (
        "unscaled twice",
        nnx_step,
        {"mistake": "unscaled twice", "inner": INNER["sgd"]},
    ),
}
_RIGHT = {
    **{
        f"{opt}, {dtype}": (step_of, {"inner": inner, "dtype": dtype})
        for opt, inner in INNER.items()
        for dtype in HALF
    },
    "a guard": (step_of, {"guard": GUARD}),
    "no S": (step_of, {"ls": NOOP, "dtype": "bfloat16"}),
    "by hand": (step_of, {"take": by_hand}),
    "a penalty": (step_of, {"change": penalized}),
    "an average": (average, {}),
    "an average, donated": (average, {"donate": True}),
    "half-precision parameters": (
        average,
        {
            "tx": jmp_scale.with_loss_scale(
                jmp_scale.with_half_parameters(ADAMW), DYNAMIC
            ),
            "dtype": jnp.bfloat16,
        },
    ),
    "nnx, bfloat16": (nnx_step, {"plain": True}),
    "pmap, donated": (pmapped, {"donate": True}),
    "no loss scale": (no_loss_scale, {}),
    "half parameters alone": (
        no_loss_scale,
        {"tx": jmp_scale.with_half_parameters(ADAMW)},
    ),
    **{
        maker.__name__: (maker, {})
        for maker in (
            in_another_order, nnx_with_metrics, sharded_jit, ensemble,
            several_steps_in_a_call, loss_scales_by_name,
        )
    },
}  # fmt: skip
# What the cures of the rules say, as settings; a mistake of a maker is left out.
_CURES = {
    "take": scaled,
    "change": same,
    "finish": returned,
    "keep": "applied",
    "accumulate": "right",
    "with_value": True,
    "mistake": None,
}


def _wrong():
    for field, rules in _PARTS.items():
        for part, rule in rules.items():
            inner = INNER if part in _WITH_EACH_OPTIMIZER else ["adamw"]
            for opt in inner:
                settings = {field: part, "inner": INNER[opt]}
                yield f"{part.__name__}, {opt}", (rule, step_of, settings)
    for maker, rules in _MISTAKES.items():
        for mistake, rule in rules.items():
            yield f"{maker.__name__}, {mistake}", (rule, maker, {"mistake": mistake})
    yield from _MORE.items()


def _cured(settings):
    """The settings after the cure: what stands around `with_loss_scale` goes inside."""
    new = {name: _CURES.get(name, value) for name, value in settings.items()}
    if "around" in new:
        new["inside"] = new.pop("around")
    return {name: value for name, value in new.items() if name != "mistake"}


def _right():
    """By name (maker, settings, rules), the rules of mistakes that are cured here."""
    found = {}
    for name, (maker, settings) in _RIGHT.items():
        found[_key(maker, settings)] = name, maker, settings, []
    for name, (rule, maker, settings) in WRONG.items():
        new = _cured(settings)
        twin = f"{name}, cured", maker, new, []
        found.setdefault(_key(maker, new), twin)[-1].append(rule)
    return {name: rest for name, *rest in found.values()}


def _key(maker, settings):
    """Equal for settings that make the same step."""
    usual = {**_CURES, "inner": ADAMW, "dtype": "float16", "ls": DYNAMIC}
    usual["accumulate"] = None
    others = {name: x for name, x in settings.items() if usual.get(name) is not x}
    return maker, *sorted((name, id(x)) for name, x in others.items())


WRONG = dict(_wrong())
RIGHT = _right()
