"""Float32 programs with one construct of JAX each, for `autocast`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers import ONE_AXIS
from jax import lax
from jax.ad_checkpoint import checkpoint_name
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
K3, K1 = arrays((3, 3, 3, 4), (1, 1, 3, 4))


def program(fun=None, *, name=None, args=(W, X), halves=True, jit=True):
    """Registers a loss of weights and more; `halves`: no product stays float32."""
    if fun is None:
        return functools.partial(program, args=args, halves=halves, jit=jit)
    PROGRAMS[name or fun.__name__] = (fun, args, halves, jit)
    return fun


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


@program(args=(W, V, X))
def layer_norm(w, g, x):
    y = x @ w
    m, v = jnp.mean(y, -1, keepdims=True), jnp.var(y, -1, keepdims=True)
    return mean_square(((y - m) * lax.rsqrt(v + 1e-6) * g[None]) @ w)


@program(args=(W, B3))
def attention(w, x):
    q, k, v = jnp.split(jnp.concatenate([x @ w, x @ w.T, x @ (w * w)], -1), 3, -1)
    scores = q @ jnp.swapaxes(k, 1, 2) / 4
    mask = jnp.tril(jnp.ones((8, 8), bool))[None]
    return mean_square(jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v)


@program(args=(W, B3[:, :, None]))
def fused_attention(w, x):
    return mean_square(jax.nn.dot_product_attention(x @ w, x, x, is_causal=True))


@program
def softmax_without_a_rule(w, x):
    with jax.softmax_custom_jvp(False):
        return mean_square(jax.nn.softmax(x @ w) @ w)


@program
def cross_entropy(w, x):
    logits = jax.nn.log_softmax(jax.nn.relu(x @ w) @ w)
    return -jnp.mean(jnp.take_along_axis(logits, jnp.arange(8)[:, None], -1))


@program
def scan_over_layers(w, x):
    ws = jnp.stack([w, w.T, w * w])
    y, zs = lax.scan(lambda y, w: (y + layer(w, y), y[0]), x, ws)
    return mean_square(y) + mean_square(zs)


@program
def scan_reversed_and_unrolled(w, x):
    def step(carry, y):
        carry = layer(w, carry) + y
        return carry, jnp.sum(carry)

    last, sums = lax.scan(step, x, jnp.stack([x] * 5), reverse=True, unroll=2)
    return mean_square(last) + jnp.mean(sums) / 100


@program
def while_loop(w, x):
    fixed = lax.stop_gradient(w)

    def body(state):
        return state[0] + 1, layer(fixed, state[1])

    _, y = lax.while_loop(lambda s: s[0] < 3, body, (0, lax.stop_gradient(x)))
    return mean_square(layer(w, y)) + mean_square(layer(w, x))


@program
def switch(w, x):
    branches = [layer, lambda w, y: y, lambda w, y: layer(w.T, y)]
    return sum(mean_square(lax.switch(i, branches, w, x)) for i in range(3))


@program
def remat_in_scan(w, x):
    f = jax.checkpoint(lambda y, w: (layer(w, y) + y, None))
    return mean_square(lax.scan(f, x, jnp.stack([w, w.T]))[0])


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


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * (jnp.abs(x) < 1),))


@jax.custom_vjp
def opaque(w, x):
    return x @ w


opaque.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))


@program(halves=False)
def custom_vjp_with_products(w, x):
    return mean_square(opaque(w, layer(w, x)))


@program(args=(K3, IMAGE))
def convolution_with_strides_and_dilation(k, x):
    return mean_square(convolve(x, k, (2, 1), ((1, 1), (1, 0)), (1, 2), (2, 2)))


@program(args=(K3.reshape(3, 3, 1, 12)[..., :6], IMAGE))
def grouped_convolution(k, x):
    return mean_square(convolve(x, k, (1, 1), "SAME", feature_group_count=3))


@program(args=(K1, K3, IMAGE))
def transposed_convolution_and_batch_norm(k1, k3, x):
    y = convolve(x, k3, (1, 1), "SAME")
    y = (y - y.mean((0, 1, 2))[None, None, None]) / jnp.sqrt(1e-5 + y.var())
    y = jax.nn.relu(y)
    return mean_square(lax.conv_transpose(y, jnp.swapaxes(k1, 2, 3), (2, 2), "SAME"))


@program(args=(jnp.stack([W, W.T]), X))
def ragged_dot(w, x):
    return mean_square(lax.ragged_dot(x, w, jnp.array([3, 5])))


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


@program(args=(W, X, jax.random.key(0)))
def dropout(w, x, key):
    keys = jax.random.split(key)
    for key in keys:
        x = layer(w, x)
        x = jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)
    return mean_square(x + jax.random.normal(key, x.shape) @ w / 10)


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


@program(args=(W, ROWS))
def shard_map_without_checks(w, x):
    def gathered(w, x):
        return layer(lax.all_gather(w, "i", axis=1, tiled=True), x)

    specs = {"in_specs": (P(None, "i"), P("i", None)), "out_specs": P("i", None)}
    f = jax.shard_map(gathered, mesh=ONE_AXIS, **specs, check_vma=False)
    return mean_square(f(w, x) @ w)


@program
def sharding_constraint(w, x):
    sharding = jax.NamedSharding(ONE_AXIS, P("i"))
    y = lax.with_sharding_constraint(x @ w, sharding)
    inner = jax.jit(layer, in_shardings=(None, sharding), out_shardings=sharding)
    return mean_square(inner(w, y))


@program
def named_scopes_and_names(w, x):
    with jax.named_scope("block"):
        y = checkpoint_name(x @ w, "y")
    return mean_square(y @ w)


@program(halves=False)
def log_of_a_marked_part(w, x):
    tiny = jmp_scale.keep_float32(lambda w, x: jnp.exp(-20 - jnp.abs(x @ w)))
    return -jnp.mean(jnp.log(tiny(w, layer(w, x))))


@program(halves=False)
def distances_by_an_exact_product(w, x):
    y = 5 + 0.1 * layer(w, x)
    squares = jnp.sum(y * y, -1)
    products = jnp.dot(y, y.T, precision="highest")
    distances = squares[:, None] + squares[None] - 2 * products + jnp.eye(len(x))
    return jnp.mean(1 / jnp.sqrt(distances))


@program
def contexts_that_change_within_an_island(w, x):
    y = jnp.sin(x @ w)
    with jax.threefry_partitionable(False):
        z = jnp.tanh(y)
    return mean_square(jnp.cos(z + y) @ w)


# Programs of one expression: the loss is the mean square of what they give.
EXPRESSIONS = {
    "reshaped_weight": lambda w, x: (
        x.reshape(4, 2, N) @ w.T.reshape(N, 4, 4).reshape(N, N)
    ),
    "inner_jit": lambda w, x: jax.jit(layer)(w, jax.jit(jax.jit(layer))(w, x)),
    "remat": lambda w, x: jax.checkpoint(layer)(w, jax.checkpoint(layer)(w, x)),
    "remat_with_a_policy": lambda w, x: jax.checkpoint(
        lambda w, y: layer(w, layer(w, y)), policy=jax.checkpoint_policies.dots_saveable
    )(w, x),
    "custom_jvp": lambda w, x: product_with_a_rule(w, layer(w, x)),
    "custom_vjp_without_products": lambda w, x: clipped(2 * x @ w) @ w,
    "vmap": lambda w, x: jax.vmap(lambda y: jax.nn.relu(w @ y) @ w)(x) @ w,
    "hessian": lambda w, x: jax.hessian(
        lambda y: mean_square(layer(w, jnp.outer(x[0], y)))
    )(w[0]),
    "associative_scan": lambda w, x: (
        lax.associative_scan(jnp.multiply, 1 + layer(w, x) / 4, axis=0) @ w
    ),
    "softmax_of_an_argument": lambda w, x: jax.nn.softmax(x) @ w,
    "constants": lambda w, x: layer(W, layer(w, x + np.ones((1, N), np.float32))),
}
for name, expression in EXPRESSIONS.items():
    program(lambda w, x, f=expression: mean_square(f(w, x)), name=name)
