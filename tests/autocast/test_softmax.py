"""A softmax is recognized by proof; what resembles one has JAX's own derivative.

Each form is a matrix that a product reads, from a square matrix of scores or a cube, so
that wrong axes have the right shapes.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import assert_norm_close
from autocast_programs import arrays
from helpers import by_name
from jax import lax

from jmp_scale import autocast

N = 4
W, X = arrays((N, N), (N, N), seed=3)
TRI = np.tri(N, dtype=bool)


def over(e, axis, others=None):
    """A softmax over axes, whose sum is reshaped in one way or another."""
    total = e.sum(axis, keepdims=others is None)
    return e / (total if others is None else jnp.expand_dims(total, others))


def shifted(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cube(s):
    return jnp.exp(s[:, None] * X[None] + s[..., None])


MATRICES = {
    "rows": lambda e, s: over(e, -1),
    "rows without their maximum": lambda e, s: shifted(s),
    "rows by a reshape": lambda e, s: e / e.sum(1).reshape(N, 1),
    "columns": lambda e, s: over(e, 0, 0),
    "all": lambda e, s: e / e.sum(),
    "sums of rows as a row": lambda e, s: e / e.sum(1)[None],
    "sums of rows reshaped": lambda e, s: e / e.sum(1).reshape(1, N),
    "sums of rows moved": lambda e, s: e / e.sum(1, keepdims=True).T,
    "sums of columns as a column": lambda e, s: e / e.sum(0)[:, None],
    "sums in reverse": lambda e, s: e / e.sum(1, keepdims=True)[::-1],
    "another sum": lambda e, s: e / (e * X**2).sum(1, keepdims=True),
    "a sum of the transpose": lambda e, s: e / jnp.exp(s.T).sum(1, keepdims=True),
    "a sum of a part": lambda e, s: e / e[:, :2].sum(1, keepdims=True),
    "a sum and more": lambda e, s: e / (1 + e.sum(1, keepdims=True)),
    "running sums": lambda e, s: e / jnp.cumsum(e, 1),
    "the maximum": lambda e, s: e / e.max(1, keepdims=True),
    "exponentials of another base": lambda e, s: over(jnp.exp2(s), 1),
    "weighted": lambda e, s: over(e * (1 + X**2), 1),
    "weighted above": lambda e, s: e * X / e.sum(1, keepdims=True),
    "masked": lambda e, s: over(jnp.where(TRI, e, 0), 1),
    "masked above": lambda e, s: jnp.where(TRI, e, 0) / e.sum(1, keepdims=True),
    "masked below": lambda e, s: e / jnp.where(TRI, e, 0).sum(1, keepdims=True),
    "masked scores": lambda e, s: shifted(jnp.where(TRI, s, -jnp.inf)),
    "read twice": lambda e, s: over(e, 1) + jnp.sin(over(e, 1)),
    "with its sum": lambda e, s: over(e, 1) + jnp.log(e.sum(1, keepdims=True)),
    "with its exponentials": lambda e, s: over(e, 1) * jnp.cos(e) + e,
    "divided twice": lambda e, s: over(e, 1) / e.sum(0)[None],
    "of a softmax": lambda e, s: over(jnp.exp(8 * over(e, 1)), 0),
    "upside down": lambda e, s: e.sum(1, keepdims=True) / e,
}
CUBES = {
    "rows of a cube": lambda e: over(e, 2),
    "two axes of a cube": lambda e: over(e, (0, 2), (0, 2)),
    "one axis of a cube": lambda e: over(e, 1, 1),
    "axes of a cube that move on": lambda e: e / e.sum(1)[None],
    "axes of a cube that swap": lambda e: e / e.sum(1).T[:, None],
    "first axes as last ones": lambda e: e / e.sum(0)[..., None],
    "last axes as first ones": lambda e: e / e.sum(2)[None],
    "another axis of a cube": lambda e: e / e.sum((0, 2))[:, None, None],
}
FORMS = MATRICES | {
    name: lambda e, s, f=f: f(cube(s)).reshape(-1, N) for name, f in CUBES.items()
}


def loop(layer):
    def loss(w, x):
        def step(total, y):
            return total + jnp.sum(layer(w, y)), None

        return lax.scan(step, 0.0, jnp.stack([x, x.T]))[0]

    return loss


def vmap(layer):
    return lambda w, x: jax.vmap(layer)(jnp.stack([w, w.T]), jnp.stack([x, x.T]))


WAYS = {"plain": lambda f: f, "loop": loop, "vmap": vmap, "remat": jax.checkpoint}
# Whether the weight is stored in half precision, and the dtype.
KINDS = (False, "float16"), (True, "bfloat16"), (True, "float16")
QUICK = [("rows", "plain"), ("rows without their maximum", "loop"), ("all", "plain")]
QUICK += [("sums of rows as a row", "plain"), ("sums of rows moved", "remat")]
QUICK += [(name, "vmap") for name in CUBES if name.startswith("axes")]
LOOKS = "another sum", "the maximum", "exponentials of another base"
QUICK += [(name, "plain") for name in LOOKS]
pairs = zip(itertools.product(FORMS, WAYS), itertools.cycle(KINDS))
ROWS = [(*row, *kind) for row, kind in pairs]
CASES = by_name([row for row in ROWS if row[:2] in QUICK], ROWS)


@pytest.mark.parametrize(("name", "way", "stored", "dtype"), CASES)
def test_what_resembles_a_softmax_has_its_own_gradient(name, way, stored, dtype):
    def layer(w, x):
        s = x @ w
        return jnp.sin(FORMS[name](jnp.exp(s), s) @ x)

    def loss(w):
        return jnp.sum(WAYS[way](layer)(w, X))

    w = W.astype(dtype) if stored else W
    wanted = jax.grad(loss)(w.astype("float32"))
    for recompute in (True, False):
        got = jax.jit(jax.grad(autocast(loss, dtype, recompute=recompute)))(w)
        assert_norm_close(got.astype("float32"), wanted, 16 * jnp.finfo(dtype).eps)


def test_a_softmax_of_nothing_has_a_gradient():
    def loss(w):
        keys = (X @ w)[:0]
        return jnp.sum(jax.nn.softmax(X @ w @ keys.T) @ keys + X @ w)

    got = jax.grad(autocast(loss, "bfloat16"))(W)
    assert_norm_close(got, jax.grad(loss)(W), 0.02)
