"""Losses that half precision changes, and what keeps them: `docs/precise-enough.md`.

`python docs/precise_enough.py` writes the rows of that page's table: the error of the
gradient by `compare_gradients` before and after the named function is kept in float32,
and the share of the matrix work that is half precision then.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import jmp_scale
from jmp_scale.diagnostics import compare_gradients, precision_report

PAGE = pathlib.Path(__file__).with_name("precise-enough.md")


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape)


def network(x, w1, w2):
    return jax.nn.gelu(x @ w1) @ w2


def weights(size, outputs):
    return normal(1, size, 64) / size**0.5, normal(2, 64, outputs) / 8


def distances(x, y):  # squared, of all pairs
    squares = jnp.sum(x**2, 1)[:, None] + jnp.sum(y**2, 1)
    return squares - 2 * x @ y.T


def discrepancy(params, x, y):  # of two clouds, seen through a network
    x, y = 10 + network(x, *params), 10 + network(y, *params)
    near = [jnp.exp(-distances(*pair) / 4) for pair in ((x, x), (y, y), (x, y))]
    return near[0].mean() + near[1].mean() - 2 * near[2].mean()


def gaussian_process(params, x, y):
    h = 5 + network(x, *params)
    factor = jnp.linalg.cholesky(jnp.exp(-distances(h, h)) + 0.01 * jnp.eye(len(x)))
    explained = jax.scipy.linalg.cho_solve((factor, True), y)
    return 0.5 * y @ explained + jnp.sum(jnp.log(jnp.diag(factor)))


def fourier_features(x):
    angles = 2 * jnp.pi * x @ (100 * normal(3, 2, 32))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)


def image(params, x, y):
    return jnp.mean((network(fourier_features(x), *params) - y) ** 2)


def rotary_tables(positions, width):  # of two axes, as for the patches of an image
    angles = positions @ jnp.tile(100 ** -jnp.linspace(0, 1, width), (2, 1))
    return jnp.sin(angles), jnp.cos(angles)


def attention(params, x, positions):
    q, k = (x @ w for w in params)
    sin, cos = rotary_tables(positions, q.shape[1] // 2)

    def turned(x):
        a, b = jnp.split(x, 2, axis=1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], 1)

    return jnp.mean((jax.nn.softmax(turned(q) @ turned(k).T / 4) @ x) ** 2)


def sinkhorn(params, x, y):
    cost = distances(10 + network(x, *params), 10 + y) / 0.1

    def step(g, _):
        f = -jax.nn.logsumexp(g - cost, axis=1)[:, None]
        return -jax.nn.logsumexp(f - cost, axis=0), f

    g, f = jax.lax.scan(step, jnp.zeros(len(y)), None, length=20)
    return jnp.sum(jnp.exp(f[-1] + g - cost) * cost) / len(x)


def readout(h, w):
    return h @ w


def energy(params, positions):  # of which most is the same for all positions
    squares = jnp.sum((positions[:, None] - positions) ** 2, -1)
    features = jnp.exp(-squares[..., None] * jnp.arange(1, 9) / 4).sum(1)
    h = jnp.concatenate([jax.nn.silu(features @ params[0]), jnp.ones((5, 1))], 1)
    return jnp.sum(readout(h, params[1]))


def forces(params, positions, energies, targets):
    found, slopes = jax.vmap(jax.value_and_grad(energy, 1), (None, 0))(
        params, positions
    )
    return jnp.mean((found - energies) ** 2) + jnp.mean((slopes + targets) ** 2)


def regression(params, x, y):  # of targets near 1,000
    h = jnp.concatenate([jax.nn.gelu(x @ params[0]), jnp.ones((len(x), 1))], 1)
    return jnp.mean((readout(h, params[1]) - y) ** 2)


X, Y = normal(4, 128, 8), normal(5, 128, 8)
GRID = jnp.stack(jnp.meshgrid(*2 * [jnp.arange(32.0)]), -1).reshape(-1, 2)
DEEP = weights(8, 8)
ATOMS = normal(6, 16, 5, 3)


def with_mean(value):
    """The weights of `DEEP` with two outputs, and an additive constant for each."""
    return DEEP[0], jnp.concatenate([DEEP[1][:, :2], jnp.full((1, 2), value)])


ENERGIES = jax.vmap(energy, (None, 0))(with_mean(-350.0), ATOMS) + normal(7, 16)
FORCES = normal(12, 16, 5, 3)

HEADS = normal(9, 64, 64) / 8, normal(10, 64, 64) / 8
MOLECULES = with_mean(-350.0), ATOMS, ENERGIES, FORCES
FIT = with_mean(1000.0), X, 1000 + Y[:, :2]
PICTURE = weights(64, 1), GRID / 32, normal(8, 1024, 1)
PATCHES = HEADS, normal(11, 1024, 64), 16 * GRID

# The loss, its arguments, and the function to keep in float32.
PROGRAMS = {
    "distances": (discrepancy, (DEEP, X, Y), "distances"),
    "Cholesky": (gaussian_process, (DEEP, X, Y[:, 0]), "distances"),
    "Fourier features": (image, PICTURE, "fourier_features"),
    "rotary tables": (attention, PATCHES, "rotary_tables"),
    "Sinkhorn": (sinkhorn, (DEEP, X, Y), "distances"),
    "energies and forces": (forces, MOLECULES, "readout"),
    "unnormalised targets": (regression, FIT, "readout"),
}


def errors(name, dtype):
    """Error of the gradient before and after, and the share of half precision after."""
    loss, args, kept = PROGRAMS[name]
    half = jmp_scale.autocast(loss, dtype)
    mended = jmp_scale.autocast(loss, dtype, keep_float32=kept)
    before, after = (compare_gradients(f, loss, *args).error for f in (half, mended))
    return before, after, precision_report(mended, *args).half_share


def percent(error):
    if np.isinf(error):
        return "not finite"
    return f"{100 * error:.0f} %" if error > 0.1 else f"{100 * error:.1g} %"


def main():
    for name, (_, _, kept) in PROGRAMS.items():
        rows = [errors(name, dtype) for dtype in ("float16", "bfloat16")]
        before, after, shares = zip(*rows, strict=True)
        link = f"[{name}](#{name.lower().replace(' ', '-')})"
        cells = [link, *map(percent, before), f"`{kept}`", *map(percent, after)]
        row = f"| {' | '.join(cells)} | {100 * shares[0]:.0f} % |"
        line = re.compile(rf"^\| {re.escape(link)} .*$", re.MULTILINE)
        PAGE.write_text(line.sub(row, PAGE.read_text()))
        print(row)


if __name__ == "__main__":
    main()
