"""Random programs of blocks that look like what `autocast` recognizes.

A few run among the slow tests. `SEEDS="100 900" pytest -m slow` of this file runs the
programs of these seeds.

All arrays are square, so that wrong axes have the right shapes. Gradients of weights
are compared with those of float32: their error is at most a few times that of the same
program with its products cast by hand.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import flat, jit_with_roundings, n32
from jax import lax
from test_picks import WAYS as PICKS
from test_softmax import CUBES, MATRICES

from jmp_scale import _jaxpr, autocast

N = 4
ROWS = np.arange(N)
MASK = np.tri(N, dtype=bool)
NAMES = "layer10", "layer2", "layer1", "gain"  # sorted, they have another order
SEEDS = range(*map(int, os.environ.get("SEEDS", "12").split()))
MODES = "clip", "fill", "promise_in_bounds", None
PLAIN = _jaxpr.words("layer bias norm softmax pick rows moves stack attention")
NESTED = _jaxpr.words("call loop carry")


def with_a_rule(fun):
    """An elementwise function with a rule, and the name of another function."""

    @jax.custom_jvp
    def softmax(x):
        return fun(x)

    softmax.defjvp(lambda x, t: (fun(*x), jax.jvp(fun, x, t)[1]))
    return softmax


@jax.custom_vjp
def half_of_a_gradient(x):
    return jnp.sin(x)


half_of_a_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) / 2,))
SMOOTH = jnp.tanh, jnp.sin, jax.nn.gelu, with_a_rule(jnp.tanh), half_of_a_gradient


class Blocks:
    """Draws blocks: functions `(dot, w, x, y)` of weights, a matrix and labels."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def one_of(self, *options):
        return options[self._rng.integers(len(options))]

    def program(self, most=3, depth=2):
        names = sorted(PLAIN | NESTED if depth else PLAIN)
        names += ["softmax", "softmax", "pick"]  # which have most forms
        blocks = [
            getattr(self, self.one_of(*names))(depth - 1)
            for _ in range(self._rng.integers(1, most + 1))
        ]

        def run(dot, w, x, y):
            for block in blocks:
                x = block(dot, w, x, y)
            return x

        return run

    def product(self):
        name = self.one_of(*NAMES)
        return self.one_of(
            lambda dot, w, x, y: dot(x, w[name]),
            lambda dot, w, x, y: dot(w[name], x),
            lambda dot, w, x, y: dot(x.T, w[name].T),
            lambda dot, w, x, y: dot(x, w[name] * 2),
            lambda dot, w, x, y: dot(x, x.T / 4) + w[name],
        )

    def layer(self, _):
        act, product, skips = self.one_of(*SMOOTH), self.product(), self.one_of(0, 1)
        return lambda dot, w, x, y: act(product(dot, w, x, y)) + skips * x

    def bias(self, _):
        """A sum with a bias, or with what has the shape of one."""
        name, act, product = self.one_of(*NAMES), self.one_of(*SMOOTH), self.product()
        bias = self.one_of(
            lambda b, x: b[:1],
            lambda b, x: b[:, :1],
            lambda b, x: b[0, 0],
            lambda b, x: b,
            lambda b, x: x.mean(0, keepdims=True),
            lambda b, x: jnp.broadcast_to(jnp.sin(x[:1]), x.shape),
            lambda b, x: (x[None] + b[None])[0],
        )
        return lambda dot, w, x, y: act(product(dot, w, x, y) + bias(w[name], x))

    def norm(self, _):
        axis, power = self.one_of(0, 1, None), self.one_of(1, 2)

        def norm(dot, w, x, y):
            size = jnp.mean(jnp.abs(x + 3) ** power, axis, keepdims=True)
            return x * lax.rsqrt(1 + size)

        return norm

    def softmax(self, _):
        """A softmax that a product reads, or what resembles one."""
        product, form = self.product(), self.one_of(*MATRICES.values())
        shift = self.one_of(
            lambda s: 0.0,
            lambda s: lax.stop_gradient(s.max(1, keepdims=True)),
            lambda s: s.mean(),
        )
        reads = self.one_of(
            lambda dot, p, x: dot(p, x),
            lambda dot, p, x: dot(x, p) + p,
            lambda dot, p, x: dot(p, p.T),
            lambda dot, p, x: dot(jnp.sin(p), x) + dot(p, x),
        )

        def softmax(dot, w, x, y):
            s = product(dot, w, x, y)
            s = s - shift(s)
            return reads(dot, form(jnp.exp(s), s), x)

        return softmax

    def pick(self, _):
        """An entry of each row, in bounds and out of them, or other entries."""
        product, mode = self.product(), self.one_of(*MODES)
        shift, dtype = self.one_of(0, 0, 2, -3), self.one_of("int32", "uint8", "int8")
        pick = self.one_of(
            *(functools.partial(way, mode=mode) for way in PICKS.values()),
            lambda z, y: z.at[ROWS[::-1], y].get(mode=mode),
            lambda z, y: z.at[ROWS // 2, y].get(mode=mode),
            lambda z, y: z.at[y].get(mode=mode)[:, 0],
            lambda z, y: jnp.take_along_axis(z, y[None], 0, mode=mode)[0],
            lambda z, y: jnp.sum(z * jax.nn.one_hot(y, N), 1),
        )
        logits = self.one_of(lambda z: z, jax.nn.log_softmax, jnp.sin)

        def picked(dot, w, x, y):
            found = pick(logits(product(dot, w, x, y)), (y + shift).astype(dtype))
            return x + jnp.nan_to_num(found).reshape(N, 1)

        return picked

    def rows(self, _):
        """Rows of a table, of a weight or of data."""
        name, mode = self.one_of(*NAMES), self.one_of("clip", "fill", None)
        table = self.one_of(lambda w, x: w, lambda w, x: w.T, lambda w, x: jnp.sin(x))

        def rows(dot, w, x, y):
            found = table(w[name], x).at[y].get(mode=mode)
            return jnp.tanh(dot(found, x) + found)

        return rows

    def moves(self, _):
        """A weight whose entries are moved, or what resembles that."""
        name, other, calls = self.one_of(*NAMES), self.one_of(*NAMES), self.one_of(0, 1)
        move = self.one_of(
            lambda w, v: w[::-1].T.reshape(2, 2 * N).reshape(N, N),
            lambda w, v: jnp.broadcast_to(w[:1], w.shape),
            lambda w, v: jnp.tile(w[None, :2], (1, 2, 1))[0],
            lambda w, v: jnp.pad(w[1:3], ((1, 1), (0, 0))),
            lambda w, v: jnp.roll(w, (1, 2), (0, 1)),
            lambda w, v: jnp.concatenate([w[:2], v[2:]]),
            lambda w, v: jnp.where(MASK, w, v),
            lambda w, v: lax.optimization_barrier((v, w))[1],
            lambda w, v: lax.reduce_precision(w, 8, 3),
            lambda w, v: (w * 8).astype("int32").astype("float32") / 8 + v,
            lambda w, v: jnp.sort(w, 0),
            lambda w, v: jnp.cumsum(w, 0) / 4,
            lambda w, v: jnp.abs(w) - lax.stop_gradient(v),
        )
        move = jax.jit(move) if calls else move

        def moved(dot, w, x, y):
            read = move(w[name], w[other])
            return jnp.tanh(dot(x, read) + dot(read.T, x))

        return moved

    def stack(self, _):
        """A weight out of a stack of them."""
        index = self.one_of(lambda y: 1, lambda y: y[0], lambda y: y[:3])

        def stack(dot, w, x, y):
            stacked = jnp.stack([*w.values()])[index(y)]
            return jnp.tanh(dot(x, stacked.reshape(-1, N, N)[0]))

        return stack

    def attention(self, _):
        left, right, value = self.product(), self.product(), self.product()
        soft = self.one_of(jax.nn.softmax, *CUBES.values())

        def attention(dot, w, x, y):
            q, k, v = (
                jnp.stack([f(dot, w, x, y)] * N) * w["gain"][:, None]
                for f in (left, right, value)
            )
            scores = dot(q, jnp.swapaxes(k, 1, 2))
            return jnp.tanh(dot(soft(jnp.exp(scores)), v).mean(0))

        return attention

    def loop(self, depth):
        """A scan that reads weights by closure, or slices of a stack of them."""
        body, is_stacked = self.program(2, depth), self.one_of(True, False)
        wrap = self.one_of(lambda f: f, jax.checkpoint)

        def loop(dot, w, x, y):
            @wrap
            def step(x, each):
                read = w | {"layer2": each} if is_stacked else w
                return jnp.tanh(body(dot, read, x, y)), x[0]

            xs = jnp.stack([w["layer1"], w["layer10"]])
            x, rows = lax.scan(step, x, xs, reverse=is_stacked)
            return x + rows.mean(0)[None]

        return loop

    def carry(self, depth):
        """A scan that carries a weight."""
        body = self.program(1, depth)

        def carry(dot, w, x, y):
            def step(carry, _):
                x, gain = carry
                return (jnp.tanh(body(dot, w | {"gain": gain}, x, y)), gain), None

            return lax.scan(step, (x, w["gain"]), length=2)[0][0]

        return carry

    def call(self, depth):
        """A program behind a call, a checkpoint or a branch, or of a batch."""
        body, other = self.program(2, depth), self.program(1, depth)
        policy, axis = jax.checkpoint_policies.dots_saveable, self.one_of(0, 1)

        def batch(f, w, x, y):
            pairs = jnp.stack([x, x.T], axis), jnp.stack([y, y[::-1]])
            return jax.vmap(lambda x, y: f(w, x, y), (axis, 0))(*pairs).sum(0)

        way = self.one_of(
            lambda f, *of: jax.jit(f)(*of),
            lambda f, w, x, y: jax.jit(lambda x: f(w, x, y))(x),
            lambda f, *of: jax.checkpoint(f)(*of),
            lambda f, *of: jax.checkpoint(f, policy=policy)(*of),
            batch,
        )

        def call(dot, w, x, y):
            run = functools.partial(body, dot)
            one = lambda x: way(run, w, x, y)  # noqa: E731
            return lax.cond(y[1] > 1, one, lambda x: other(dot, w, x, y), x)

        return call


class Held:
    """An object with a method, which holds weights."""

    def __init__(self, run, w):
        self.run, self.w = run, w

    def __call__(self, x, y):
        return self.run(self.w, x, y)


# How weights reach the function that is cast.
WAYS = {
    "argument": lambda cast, run, w: functools.partial(cast(run), w),
    "partial": lambda cast, run, w: cast(functools.partial(run, w)),
    "closure": lambda cast, run, w: cast(lambda x, y: run(w, x, y)),
    "method": lambda cast, run, w: cast(Held(run, w).__call__),
}


def by_hand(dtype):
    def dot(x, y):
        return jnp.matmul(x.astype(dtype), y.astype(dtype)).astype(jnp.float32)

    return dot


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_has_the_gradient_of_one_cast_by_hand(seed):
    blocks = Blocks(seed)
    run, way = blocks.program(), WAYS[blocks.one_of(*WAYS)]
    dtype = blocks.one_of("float16", "bfloat16")
    # JAX sorts the names of arguments.
    order = NAMES if way is not WAYS["argument"] else sorted(NAMES)
    rng = np.random.default_rng(seed)
    weights = {name: jnp.float32(rng.normal(size=(N, N)) / 2) for name in NAMES}
    for name in blocks.one_of((), NAMES[:2], NAMES):
        weights[name] = weights[name].astype(dtype)
    x = jnp.float32(rng.normal(size=(N, N)))
    y = jnp.asarray(rng.integers(0, N, N), jnp.int32)

    def gradient(weights, dot=jnp.matmul, cast=lambda f: f):
        def loss(w):
            held = {name: w[name] for name in order}
            z = way(cast, functools.partial(run, dot), held)(x, y)
            return 8 * jnp.mean(jnp.sin(z) + z * z / 4)

        return jax.grad(loss)(weights)

    def gradients(weights):
        wide = jax.tree.map(n32, weights)
        yield gradient(wide)
        yield gradient(wide, by_hand(dtype))
        for recompute in (True, False):
            cast = functools.partial(autocast, dtype=dtype, recompute=recompute)
            yield gradient(weights, cast=cast)

    found = jit_with_roundings(lambda weights: [*gradients(weights)])(weights)
    exact, *others = map(flat, found)
    size = np.linalg.norm(exact) + 1e-2
    hand, *ours = (np.linalg.norm(each - exact) / size for each in others)
    bound = 6 * hand + 12 * float(jnp.finfo(dtype).eps)
    # A program may overflow, and then there is nothing to compare.
    assert np.isnan(hand) or all(error <= bound for error in ours)
