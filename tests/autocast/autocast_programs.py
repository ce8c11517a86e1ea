"""Float32 programs with one construct of JAX each, for `autocast`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers import ONE_AXIS
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jmp_scale
from jmp_scale import _jaxpr

PROGRAMS = {}
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
N = 16


def arrays(*shapes, seed=0, scale=1 / 2):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s) * scale, jnp.float32) for s in shapes]


W, X, V, B3, IMAGE = arrays((N, N), (8, N), (N,), (4, 8, N), (2, 8, 8, 3))
(ROWS,) = arrays((32, N))
(K3,) = arrays((3, 3, 3, 4))


def program(fun=None, *, args=(W, X), halves=True):
    """Registers a loss of weights and more; `halves`: no product stays float32."""
    if fun is None:
        return functools.partial(program, args=args, halves=halves)
    PROGRAMS[fun.__name__] = (fun, args, halves)
    return fun


def of(expression, *args, halves=True):
    """A program whose loss is the mean square of an expression."""
    return lambda *args: mean_square(expression(*args)), args or (W, X), halves


def mean_square(x):
    return jnp.mean(jnp.square(x))


def layer(w, x):
    return jnp.tanh(x @ w)


convolve = functools.partial(
    lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC")
)


def products(fun, *args):
    """The dtypes of both operands of each product, nested ones too."""
    return [
        tuple(_jaxpr.dtype_name(v) for v in eqn.invars[:2])
        for eqn in _jaxpr.equations(jax.make_jaxpr(fun)(*args))
        if eqn.primitive.name in PRODUCTS
    ]


@program(args=(W, B3))
def attention(w, x):
    q, k, v = jnp.split(jnp.concatenate([x @ w, x @ w.T, x @ (w * w)], -1), 3, -1)
    scores = q @ jnp.swapaxes(k, 1, 2) / 4
    mask = jnp.tril(jnp.ones((8, 8), bool))[None]
    return mean_square(jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v)


@program
def cross_entropy(w, x):
    logits = jax.nn.log_softmax(jax.nn.relu(x @ w) @ w)
    return -jnp.mean(jnp.take_along_axis(logits, jnp.arange(8)[:, None], -1))


@program
def scan_reversed_and_unrolled(w, x):
    def step(carry, y):
        carry = layer(w, carry) + y
        return carry, jnp.sum(carry)

    last, sums = lax.scan(step, x, jnp.stack([x] * 5), reverse=True, unroll=2)
    return mean_square(last) + jnp.mean(sums) / 100


@program
def switch(w, x):
    branches = [layer, lambda w, y: y, lambda w, y: layer(w.T, y)]
    return sum(mean_square(lax.switch(i, branches, w, x)) for i in range(3))


@jax.custom_jvp
def product_with_a_rule(w, x):
    return jnp.tanh(x @ w)


@product_with_a_rule.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = product_with_a_rule(w, x)
    return y, (1 - y**2) * (dx @ w + x @ dw)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(
    lambda x: (clipped(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 1, g, 0),)
)


@jax.custom_vjp
def opaque(w, x):
    return x @ w


opaque.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))


@program
def scatter_and_gather(w, x):
    y = x @ w
    z = jnp.zeros((8, N)).at[jnp.arange(4)].add(y[::2]).at[0, 0].set(1.0)
    return mean_square(z @ w) + mean_square(y[jnp.array([1, 3])])


@program(halves=False)  # those of the derivatives of a solver
def linear_algebra(w, x):
    a = jnp.eye(N) * 4 + (w @ w.T)
    y = jnp.linalg.solve(a, (x @ w).T)
    return mean_square(y) + jnp.linalg.slogdet(a)[1] / 100


@program(args=(W, X, jnp.zeros((0, N))))
def zero_sized_arrays(w, x, nothing):
    return mean_square(x @ w) + jnp.sum(jnp.tanh(nothing @ w) @ w)


@program
def reference(w, x):
    ref = jax.new_ref(jnp.zeros((8, N)))
    ref[...] = layer(w, x)
    ref[0] = ref[0] * 2
    return mean_square(ref[...] @ w)


def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


@program
def pallas_kernel(w, x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    double = pl.pallas_call(double_kernel, out_shape=shape, interpret=True)
    return mean_square(layer(w, x) + double(lax.stop_gradient(x @ w)))


@program(args=(W, ROWS))
def shard_map(w, x):
    @functools.partial(
        jax.shard_map, mesh=ONE_AXIS, in_specs=(P(), P("i")), out_specs=P()
    )
    def loss(w, x):
        return lax.pmean(mean_square(layer(w, jax.nn.gelu(x @ w) + x)), "i")

    return loss(w, x)


@program(halves=False)
def log_of_a_marked_part(w, x):
    tiny = jmp_scale.keep_float32(lambda w, x: jnp.exp(-20 - jnp.abs(x @ w)))
    return -jnp.mean(jnp.log(tiny(w, layer(w, x))))


PROGRAMS |= {
    "layer_norm": of(
        lambda w, g, x: (jax.nn.standardize(x @ w) * g[None]) @ w, W, V, X
    ),
    "reshaped_weight": of(
        lambda w, x: x.reshape(4, 2, N) @ w.T.reshape(N, 4, 4).reshape(N, N)
    ),
    "inner_jit": of(lambda w, x: jax.jit(layer)(w, jax.jit(jax.jit(layer))(w, x))),
    "remat": of(lambda w, x: jax.checkpoint(layer)(w, jax.checkpoint(layer)(w, x))),
    "custom_jvp": of(lambda w, x: product_with_a_rule(w, layer(w, x))),
    "custom_vjp_without_products": of(lambda w, x: clipped(2 * x @ w) @ w),
    "custom_vjp_with_products": of(lambda w, x: opaque(w, layer(w, x)), halves=False),
    "softmax_without_a_rule": of(
        jax.softmax_custom_jvp(False)(lambda w, x: jax.nn.softmax(x @ w) @ w)
    ),
    "vmap": of(lambda w, x: jax.vmap(lambda y: jax.nn.relu(w @ y) @ w)(x) @ w),
    "associative_scan": of(
        lambda w, x: lax.associative_scan(jnp.multiply, 1 + layer(w, x) / 4, axis=0) @ w
    ),
    "constants": of(lambda w, x: layer(W, layer(w, x + np.ones((1, N), np.float32)))),
    "convolution_with_strides_and_dilation": of(
        lambda k, x: convolve(x, k, (2, 1), ((1, 1), (1, 0)), (1, 2), (2, 2)), K3, IMAGE
    ),
    "grouped_convolution": of(
        lambda k, x: convolve(x, k, (1, 1), "SAME", feature_group_count=3),
        *(K3.reshape(3, 3, 1, 12)[..., :6], IMAGE),
    ),
    "ragged_dot": of(
        lambda w, x: lax.ragged_dot(x, w, jnp.array([3, 5])), jnp.stack([W, W.T]), X
    ),
}
