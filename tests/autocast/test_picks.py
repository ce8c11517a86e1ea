"""A label's logit is found by comparison, with the value and gradient of a gather.

The products of these programs are exact in half precision, and `b` is added to the
logits, so that its gradient is theirs in float32. So all of it is that of JAX's gather.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_programs import arrays
from helpers import EXPLICIT, ONE_AXIS, by_name, slow
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_scale import _jaxpr, autocast

ROWS, WIDTH, SIZE = 8, 4, 12
(B,) = arrays((ROWS, SIZE))
H = jnp.asarray(np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 7 - 3, jnp.float32)
W = jnp.tile(jnp.eye(WIDTH), (1, 3)) / 2
LABELS = jnp.asarray([3, 0, 11, 7, 7, 5, 1, 10])
ARGS = B, LABELS, H, W
COUNT = jnp.arange(ROWS)
log_softmax = jax.nn.log_softmax
entropy = optax.softmax_cross_entropy_with_integer_labels


def of_logits(loss):
    """A loss of `b`, of logits b + H @ W, and of labels."""
    return lambda b, labels, h, w: loss(b + h @ w, labels)


def along(x, labels, axis=-1):
    return jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis)


def in_chunks(body):
    """A scan over pairs of rows, whose products are within."""

    def loss(b, labels, h, w):
        def chunk(total, batch):
            b, labels, h = batch
            return total + body(b + h @ w, labels), None

        pairs = (x.reshape(4, 2, *x.shape[1:]) for x in (b, labels, h))
        return lax.scan(chunk, 0.0, tuple(pairs))[0]

    return loss


def negative_log(logits, labels):
    return -jnp.sum(along(log_softmax(logits), labels))


def smoothed(logits, labels):
    """With a mask of labels that are ignored."""
    logs, seen = log_softmax(logits), labels != 7
    losses = 0.9 * along(logs, jnp.where(seen, labels, 0))[:, 0] + 0.1 * logs.mean(-1)
    return -jnp.mean(losses, where=seen)


def halves(x):
    return x.reshape(2, 4, *x.shape[1:])


LOSSES = {
    "optax": lambda x, y: jnp.mean(entropy(x, y)),
    "along the first axis": lambda x, y: jnp.sum(
        along(log_softmax(x.T, axis=0), y, axis=0)
    ),
    "rows of vmap": lambda x, y: jnp.sum(
        jax.vmap(lambda row, label: row[label])(log_softmax(x), y)
    ),
    "three columns": lambda x, y: jnp.sum(
        log_softmax(halves(x))[jnp.arange(2)[:, None], np.arange(4)[None], halves(y)]
    ),
    "smoothed and masked": smoothed,
    "branches": lambda x, y: lax.cond(
        x[0, 0] > 9, lambda x, _: jnp.sum(x), negative_log, x, y
    ),
}
FORMS = {name: of_logits(loss) for name, loss in LOSSES.items()} | {
    "chunks in a checkpoint": in_chunks(jax.checkpoint(negative_log)),
    "shard_map": jax.shard_map(
        lambda *args: lax.psum(of_logits(negative_log)(*args), "i"),
        mesh=ONE_AXIS,
        in_specs=(P("i"), P("i"), P("i"), P()),
        out_specs=P(),
    ),
}


def gathered(fun, *args, grad=jax.value_and_grad):
    """Shapes of what is gathered from or scattered to, in the loss and its gradient."""
    eqns = _jaxpr.equations(jax.make_jaxpr(grad(fun))(*args))
    names = "gather", "scatter", "scatter-add"
    found = [eqn.invars[0] for eqn in eqns if eqn.primitive.name in names]
    return [*map(_jaxpr.shape, found)]


def assert_equal(fun, reference, args):
    found, wanted = (jax.jit(jax.value_and_grad(f))(*args) for f in (fun, reference))
    # A last digit where XLA:CPU fuses a sum otherwise.
    equal = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(equal, found, wanted)


QUICK = "optax", "along the first axis", "rows of vmap", "branches", "shard_map"
QUICK += ("smoothed and masked",)
CASES = by_name(
    [*((name, True) for name in QUICK), ("three columns", False)],
    itertools.product(FORMS, (True, False)),
)


@pytest.mark.parametrize(("name", "recompute"), CASES)
def test_a_loss_has_the_value_and_gradient_of_its_gather(name, recompute):
    half = autocast(FORMS[name], "bfloat16", recompute=recompute)
    assert_equal(half, FORMS[name], ARGS)
    assert not [shape for shape in gathered(half, *ARGS) if SIZE in shape]


OUT_OF_BOUNDS = jnp.asarray([-100, -SIZE - 1, -SIZE, -1, SIZE - 1, SIZE, 300, 2])


WAYS = {
    "rows": lambda x, y, **options: x.at[jnp.arange(len(y)), y].get(**options),
    "columns": lambda x, y, **options: x.T.at[y, jnp.arange(len(y))].get(**options),
    "vmap": lambda x, y, **options: jax.vmap(lambda x, y: x.at[y].get(**options))(x, y),
    "along": lambda x, y, mode=None, **options: jnp.take_along_axis(
        x, y[:, None], 1, mode=mode, **options
    ),
    "slice": lambda x, y, **_: jax.vmap(lax.dynamic_index_in_dim)(x, y),
}
OPTIONS = [{"mode": mode} for mode in ("clip", "fill", "promise_in_bounds", None)]
OPTIONS += [{"mode": "fill", "fill_value": fill} for fill in (3.0, np.float16(3))]
ROWS_OF_MODES = [
    (*row, dtype)
    for row, dtype in zip(
        itertools.product(WAYS, OPTIONS),
        itertools.cycle(("int32", "uint8", "int16", "uint32")),
    )
]


@pytest.mark.parametrize(
    ("way", "options", "dtype"), by_name(ROWS_OF_MODES[::6], ROWS_OF_MODES)
)
def test_labels_out_of_bounds_are_those_of_the_mode_in_any_integers(
    way, options, dtype
):
    def picked(x, y):
        return WAYS[way](x, y, **options)

    def loss(x, y):
        return jnp.sum(jnp.nan_to_num(picked(x, y)) ** 2)

    # As NumPy casts: -100 is 156.
    args = B, np.asarray(OUT_OF_BOUNDS).astype(dtype), H, W
    with jax.numpy_dtype_promotion("strict"):
        assert_equal(autocast(of_logits(loss), "bfloat16"), of_logits(loss), args)
        half = jax.jit(autocast(of_logits(picked), "bfloat16"))
        np.testing.assert_array_equal(half(*args), of_logits(picked)(*args))
        assert not gathered(autocast(of_logits(loss), "bfloat16"), *args)


def test_infinite_logits_of_a_mask_reach_no_other_entry():
    def loss(x, y):
        x = jnp.where(jnp.arange(SIZE)[None] == 0, -jnp.inf, x)
        picked = along(log_softmax(x), y)
        return jnp.sum(jnp.where(jnp.isinf(picked), 0, picked))

    half = autocast(of_logits(loss), "bfloat16")
    assert not gathered(half, *ARGS)
    assert_equal(half, of_logits(loss), ARGS)
    infinite = jax.jit(autocast(lambda b, y, h, w: along(b + h @ w, y), "bfloat16"))
    args = B.at[:, ::2].set(jnp.inf).at[1].set(jnp.nan), *ARGS[1:]
    wanted = along(args[0] + H @ W, LABELS)
    np.testing.assert_array_equal(infinite(*args), wanted)


KEPT = {
    "an embedding": lambda x, y, h: jnp.sum(h[y % 8] @ h.T) + jnp.sum(x),
    "a table of parameters": lambda x, y, h: jnp.sum(along(h, y % WIDTH)) + jnp.sum(x),
    "several of a row": lambda x, y, h: jnp.sum(
        jnp.take_along_axis(x, jnp.stack([y, 0 * y], -1), -1)
    ),
    "one axis": lambda x, y, h: jnp.sum(x[0][y]),
    "rows that start later": lambda x, y, h: jnp.sum(x[COUNT + 1, y] * (1 + COUNT)),
    "rows that wrap": lambda x, y, h: jnp.sum(
        jnp.tile(x, (40, 1))[jnp.arange(320).astype("uint8"), jnp.tile(y, 40)]
        * jnp.arange(320)
    ),
    "rows in columns": lambda x, y, h: jnp.sum(
        x[COUNT.reshape(2, 4).ravel(order="F"), y] * (1 + COUNT)
    ),
    "rows that an input shifts": lambda x, y, h: jnp.sum(x[COUNT + 0 * y, y]),
    "all labels of each row": lambda x, y, h: jnp.sum(x[COUNT[:, None], y[None]] ** 2),
    "a diagonal": lambda x, y, h: jnp.sum(x[:, :8][COUNT, COUNT] * y),
    "a diagonal of a cube": lambda x, y, h: jnp.sum(
        (x[:, :8, None] * x[:, None])[COUNT, COUNT, y]
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_gather_of_anything_else_stays(name):
    def loss(b, labels, h, w):
        return KEPT[name](b + h @ w, labels, h)

    half = autocast(loss, "bfloat16")
    assert_equal(half, loss, ARGS)
    assert gathered(half, *ARGS) == gathered(loss, *ARGS)


@pytest.mark.parametrize("recompute", [True, slow(False)])
def test_second_derivatives_are_those_of_the_gather(recompute):
    def loss(x, y):
        return jnp.sum(along(jnp.sin(x) * x, y) ** 3)

    def curvature(loss):
        return lambda *args: jnp.sum(jnp.sin(jax.grad(loss)(*args)))

    half = autocast(of_logits(loss), "bfloat16", recompute=recompute)
    assert_equal(curvature(half), curvature(of_logits(loss)), ARGS)


def test_explicit_axes_split_the_rows():
    args = [jax.device_put(x, NamedSharding(EXPLICIT, P("i"))) for x in (B, LABELS, H)]
    with jax.set_mesh(EXPLICIT):
        half = autocast(of_logits(negative_log), "bfloat16")
        assert not gathered(half, *args, W)
        found = jax.jit(jax.grad(half))(*args, W)
    assert found.sharding.spec[0] == "i"
    wanted = jax.grad(of_logits(negative_log))(*ARGS)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_loop_saves_labels_and_no_masks_of_a_row(recompute):
    half = autocast(in_chunks(negative_log), "bfloat16", recompute=recompute)
    residuals = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(half, *a)[1], *ARGS))
    assert not [x for x in residuals if x.dtype == bool and SIZE in x.shape]


def test_indices_that_are_read_many_times_are_computed_once():
    def loss(x, labels):
        rows = jnp.arange(ROWS)
        for _ in range(60):  # 2**60 ways lead from the sum to its operand
            rows = rows + rows
        return x[rows, labels].sum()

    fun = of_logits(loss)
    assert autocast(fun, "float16")(*ARGS) == fun(*ARGS)
