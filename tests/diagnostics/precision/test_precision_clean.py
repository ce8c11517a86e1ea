"""`precision_report` is silent about programs that handle half precision well."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import slow
from jax import lax
from jax.extend.core import JaxprEqn
from losses import cross_entropy, examples

import jmp_scale.nnx
from jmp_scale._jaxpr import equations
from jmp_scale.diagnostics import precision_report
from jmp_scale.diagnostics._precision.walk import Walk

pytestmark = pytest.mark.usefixtures("ranks_promote")

F32 = jnp.float32


@pytest.fixture(params=["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def half(request):
    return request.param


@pytest.fixture
def policy(half):
    return jmp_scale.get_policy(f"params=float32,compute={half},output=float32")


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def assert_clean(fun, *args, half_share=1.0, **kwargs):
    report = precision_report(fun, *args, **kwargs)
    assert [f for f in report.findings if f.level != "note"] == []
    assert report.not_looked_into == ()
    if half_share == 1.0:
        assert report.findings == ()
    assert report.half_share == pytest.approx(half_share, abs=1e-3)


@pytest.mark.parametrize("wrap", [functools.partial, slow(jax.checkpoint)])
def test_a_scan_over_a_transformer_is_read_once(half, wrap, monkeypatch):
    """A rule that reads it again in each iteration would take minutes."""
    (transformer,) = examples(monkeypatch, "_transformer")

    def loss(params, tokens):
        log_probs = functools.partial(transformer.read, params, dtype=half)
        return -jnp.mean(lax.map(wrap(log_probs), tokens))

    args = transformer.init_params(0), array(12, transformer.LENGTH + 1, dtype="int32")
    read: list[JaxprEqn] = []
    one = Walk._pass
    monkeypatch.setattr(Walk, "_pass", lambda *args: read.append(args[1]) or one(*args))
    assert_clean(loss, *args)
    program = jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    assert len(read) < 3 * len([*equations(program)])


def test_a_gated_state_is_no_average(policy):
    def loss(w, xs):
        w, xs = policy.cast_to_compute((w, xs))

        def step(h, x):
            gate, new = jnp.split(x @ w, 2, -1)
            gate = jax.nn.sigmoid(gate)
            return gate * h + (1 - gate) * new, None

        h, _ = lax.scan(step, jnp.zeros((4, 32), w.dtype), xs)
        return jnp.mean(policy.cast_to_output(h) ** 2)

    assert_clean(loss, array(8, 64), array(16, 4, 8))


@pytest.mark.parametrize(
    "choose",
    {
        "a short axis": lambda h, t: t[:200][h.astype(int)],
        "a short axis of two": lambda h, t: t.T[h.astype(int), jnp.arange(8)],
        "few codes": lambda h, t: t[jnp.clip(h, 0, 15).astype(int)],
        "few integers": lambda h, t: t[jnp.clip(h.astype(int), 0, 99)],
        "an argmax": lambda h, t: t[jnp.argmax(h.astype(F32))],
        "integers of a table": lambda h, t: t[
            jnp.arange(512)[jnp.clip(h, 0, 99).astype(int)]
        ],
        "a mask": lambda h, t: jnp.where(jnp.arange(512)[:8] < 4, h[0], 0),
    }.items(),
    ids=lambda item: item[0],
)
def test_indices_that_half_precision_tells_apart(choose):
    def loss(table, x):
        chosen = choose[1](x.astype("bfloat16"), table)
        return jnp.mean(chosen.astype(F32))

    assert_clean(loss, array(512, 4), array(8), half_share=0)


def test_many_residual_blocks_and_a_gated_scan_are_no_sum():
    def gated(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    def loss(w, x):
        h, w = x.astype("bfloat16"), w.astype("bfloat16")
        for _ in range(20):
            h = h + jnp.tanh(h @ w)
        _, h = lax.associative_scan(gated, (jax.nn.sigmoid(h), h))
        return jnp.mean(h.astype(F32))

    assert_clean(loss, array(8, 8), array(8192, 8))


def test_the_activations_of_jax_nn(policy):
    functions = [
        jax.nn.celu, jax.nn.elu, jax.nn.gelu, jax.nn.hard_swish, jax.nn.hard_tanh,
        jax.nn.leaky_relu, jax.nn.log_sigmoid, jax.nn.mish, jax.nn.relu, jax.nn.relu6,
        jax.nn.selu, jax.nn.sigmoid, jax.nn.silu, jax.nn.soft_sign, jax.nn.softplus,
        jax.nn.squareplus, jnp.tanh, lambda x: jax.nn.gelu(x, approximate=False),
    ]  # fmt: skip

    def loss(w, x):
        h = policy.cast_to_compute(x) @ policy.cast_to_compute(w)
        for function in functions:
            h = function(h)
        return jax.nn.logsumexp(jax.nn.softmax(policy.cast_to_output(h)))

    assert_clean(loss, array(8, 8), array(16, 8))


def test_masks_positions_and_noise_that_half_precision_holds(policy):
    def loss(w, x, key):
        h = policy.cast_to_compute(x) @ policy.cast_to_compute(w)
        dtype = h.dtype
        h = jnp.where(h > 0, h, jnp.finfo(dtype).min) + jnp.where(h > 0, 0.0, -1e4)
        h = h + ((1 - (h > 0).astype(F32)) * -1e4).astype(dtype)
        h = h * jax.nn.softmax(jnp.where(h > 0, h.astype(F32), -1e9)).astype(dtype)
        h = jnp.maximum(h, jnp.full(h.shape, -jnp.inf, dtype))
        h = jnp.where(h > 0, h, jnp.asarray(-jnp.inf, dtype))
        h = h + jnp.arange(16, dtype=dtype)[:, None] + jnp.eye(16, 64, dtype=dtype)
        h = h + jnp.linspace(-1, 1, 5000, dtype=dtype)[:16, None]
        h = h * jnp.asarray(np.geomspace(1e-9, 1, 16)).astype(dtype)[:, None]
        number = lax.cond(x[0, 0] > 0, lambda: F32(4096), lambda: F32(0))
        h = h + number.astype(dtype)
        h = h + jax.nn.one_hot(jnp.arange(5000) % 16, 64, dtype=dtype)[:16]
        angles = jnp.arange(5000)[:, None] * jnp.exp(-jnp.arange(64) / 8.0)
        h = h + jnp.sin(angles)[:16].astype(dtype)
        h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0)
        h = h + jax.random.normal(key, h.shape, dtype) * np.sqrt(0.5)
        h = h / jax.nn.relu(h)
        h = h / (jnp.abs(h) + 1e-3) + jnp.tanh(h) ** 2 + jax.nn.sigmoid(h) ** 3
        return jnp.mean(policy.cast_to_output(h))

    assert_clean(loss, array(64, 64), array(16, 64), jax.random.key(0))


def test_a_mean_of_many_entries(policy):
    def loss(w):
        h = policy.cast_to_compute(w)
        mean = jnp.mean(h, axis=0) + jnp.sum(h, axis=0, dtype=F32) / h.shape[0]
        return jnp.sum(policy.cast_to_output(mean * 2))

    assert precision_report(loss, array(100_000, 2)).findings == ()


PICKS = {
    "take_along_axis": lambda z, y: jnp.take_along_axis(z, y[:, None], 1)[:, 0],
    "by two indices": lambda z, y: z[jnp.arange(len(y)), y],
    "rows of a table": lambda z, y: z[y % 16],  # how often each row, nobody knows
}


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("cast", [None, jmp_scale.autocast])
def test_what_is_looked_up_in_half_precision_is_no_sum(pick, cast):
    def loss(w, x, y):
        half = jnp.bfloat16 if cast is None else x.dtype
        z = x.astype(half) @ w.astype(half)
        picked = PICKS[pick](z, y).astype(F32)
        return jnp.mean(jax.nn.logsumexp(z.astype(F32), 1)) - jnp.mean(picked)

    args = array(16, 16), array(8192, 16), array(8192, dtype="int32")
    fun = cast(loss, "bfloat16") if cast else loss
    assert precision_report(fun, *args).findings == ()


def test_a_program_in_float32():
    def loss(w, x):
        h = jnp.exp(x @ w) + jnp.arange(64) / 1e-9
        normalized = h / (jnp.linalg.norm(h) + 1e-12)
        return jnp.mean(normalized**2) - jnp.log(h + 1e-20).sum()

    assert_clean(loss, array(64, 64), array(16, 64), half_share=0.0)


def test_flax_linen(half):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(64, 32, dtype=half)(tokens)
            for _ in range(2):
                x = nn.Conv(32, (3,), dtype=half)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=half)(x))
                x = nn.avg_pool(nn.max_pool(x, (2,)), (2,))
            x = nn.GroupNorm(4, dtype=half)(nn.RMSNorm(dtype=half)(x))
            x = nn.RNN(nn.OptimizedLSTMCell(32, dtype=half))(x)
            x = nn.Dropout(0.1, deterministic=False)(x.mean(1))
            return nn.Dense(64, dtype=half)(x).astype(F32)

    model, tokens = Network(), array(4, 16, dtype="int32")
    init = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(model.init, init, tokens)

    def loss(params, statistics, tokens, key):
        given = {"params": params, "batch_stats": statistics}
        options = {"mutable": ["batch_stats"], "rngs": {"dropout": key}}
        logits, updates = model.apply(given, tokens, **options)
        return cross_entropy(logits, tokens[:, 0]), updates

    args = variables["params"], variables["batch_stats"], tokens, jax.random.key(0)
    assert_clean(loss, *args, has_aux=True)
