"""What `precision_report` says of whole programs, where, and in which order."""

import functools

import equinox as eqx
import equinox.internal as equinox_internal
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ONE_AXIS
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from precision_checks import assert_finds, line_of

import jmp_scale
from jmp_scale.diagnostics import precision_report

pytestmark = pytest.mark.usefixtures("ranks_promote")

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def product(w, x, dtype=F16):
    return (x.astype(dtype) @ w.astype(dtype)).astype(F32)


def rules(*args, **kwargs):
    return [f.rule for f in precision_report(*args, **kwargs).findings]


# Losses of W and X, with what is found in them.


def maximum_of_an_indexed_array(w, x):
    half = (x @ w).astype(F16)
    best = lambda i, best: jnp.maximum(best, half[i % 16])  # noqa: E731
    return jnp.mean(lax.fori_loop(0, 100, best, half[0]).astype(F32))


def rows_written_in_turn(w, x):
    write = lambda rows, i_row: (rows.at[i_row[0]].add(i_row[1]), None)  # noqa: E731
    half = (x @ w).astype(F16)
    rows, _ = lax.scan(write, jnp.zeros_like(half), (jnp.arange(16), half))
    return jnp.mean(rows.astype(F32))


def float32_sums_over_half_precision(w, x):
    h = jnp.tile(w[0] * x[0], 8192).astype(F16)
    reverse = lax.cumsum(jnp.tanh(h).astype(F32), reverse=True)
    return jnp.cumsum(h, dtype=F32)[-1] + reverse[0]


def residual_stream_of_inner_loops(w, x):
    def step(h, _):
        inner, _ = lax.scan(lambda h, _: (jnp.tanh(h), None), h, None, length=2)
        return h + inner, None

    return jnp.mean(lax.scan(step, x.astype(F16), None, 5)[0].astype(F32))


def accumulated_gradients(w, x):
    def step(state, x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        total = state["total"] + gradient.astype(BF16)  # !half-carry
        return {"total": total, "count": state["count"] + 1}, None

    start = {"total": jnp.zeros(w.shape, BF16), "count": 0}
    state, _ = lax.scan(step, start, jnp.stack([x, x]))
    return jnp.mean(state["total"].astype(F32))


def forward_and_backward(w, x):
    h = jnp.tile(w[0].astype(F16), (10_000, 1))  # !half-sum
    total = jnp.sum(h * jnp.sum(h))  # !half-sum:error
    return total.astype(F32)


OVER_DEVICES = {"in_specs": (P(), P("i")), "out_specs": P(), "check_vma": False}


@functools.partial(jax.shard_map, mesh=ONE_AXIS, **OVER_DEVICES)
def mean_over_devices(w, x):
    h = x.astype(F16) @ w.astype(F16)
    centred = h - lax.pmean(h.mean(0), "i")  # !half-collective
    return lax.pmean(jnp.mean(centred.astype(F32)), "i")


LOSSES = [
    maximum_of_an_indexed_array, float32_sums_over_half_precision,
    accumulated_gradients, forward_and_backward, residual_stream_of_inner_loops,
    rows_written_in_turn, mean_over_devices,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_has_its_findings_and_no_others(loss):
    found = assert_finds([loss], jax.jit(loss), W, X).findings
    if loss is forward_and_backward:
        assert ["backward" in f.where for f in found] == [False, True]


def test_half_parameters_are_an_error_that_names_them():
    def loss(params, x):
        return jnp.mean((x.astype(F16) @ params["a"]["w"]).astype(F32))

    params = {"a": {"w": W.astype(F16), "b": W}, "c": [W.astype(F16)]}
    named = jax.jit(functools.partial(jax.named_call, name="loss")(loss))
    for fun in (loss, named):
        (finding,) = precision_report(fun, params, X).findings
        assert (finding.rule, finding.level) == ("half-parameters", "error")
        assert finding.where == f"{__file__}:{line_of(loss)}"
        assert "(2 arrays, ['a']['w'])" in finding.text


def test_only_differentiated_arguments_are_parameters():
    def loss(w, x):
        return jnp.mean((x @ w.astype(F16)).astype(F32))

    args = (W, X.astype(F16))
    assert rules(loss, *args) == []
    assert rules(loss, *args, argnums=1) == ["half-parameters"]
    assert rules(loss, *args, argnums=(0, 1)) == ["half-parameters"]


def test_a_half_loss_made_in_a_helper_stands_in_the_function_given():
    def helper(y):
        return jnp.mean(y).astype(BF16)

    def loss(w, x):  # !half-loss
        y = x @ w
        return helper(y), {"x": x.astype(F16), "name": "aux"}

    assert_finds([loss], loss, W, X, has_aux=True)


def test_the_half_share_counts_forward_and_backward():
    def loss(w, x):
        h = product(w, x)  # 3 products of 16 x 8 x 8 in half
        return jnp.mean(h @ w)  # 3 in float32

    report = precision_report(loss, W, X, argnums=(0, 1))
    (finding,) = report.findings
    assert (finding.rule, finding.level) == ("full-matmul", "note")
    assert report.half_share == 0.5
    rows = sorted(report.operations[:2], key=lambda row: row.dtype)
    for row, dtype in zip(rows, ("float16", "float32"), strict=True):
        assert (row.primitive, row.dtype, row.executions) == ("dot_general", dtype, 3)
        assert (row.flops, row.share) == (3 * 2 * 16 * 8 * 8, 0.5)


def test_a_scan_counts_its_iterations():
    def loss(w, x):
        step = lambda h, _: (jnp.tanh(h @ w.astype(F16)), None)  # noqa: E731
        h, _ = lax.scan(step, x.astype(F16), None, length=5)
        return jnp.mean(h.astype(F32) @ w)

    report = precision_report(loss, W, X)
    assert report.half_share == pytest.approx(5 / 6, abs=0.01)
    assert ("tanh", "float16", 5, 0, 0) in report.operations


def layers(length, outside, residual, w, x):
    half = w.astype(F16) if outside else w

    def step(h, _):
        new = jnp.tanh(h @ half.astype(F16))
        return h + new if residual else new, None

    h, _ = lax.scan(step, x.astype(F16), None, length=length)
    return jnp.mean(h.astype(F32))


def test_only_weights_cast_outside_of_a_long_loop_accumulate_their_gradients():
    loss = functools.partial(layers, 64, True, False)
    (finding,) = precision_report(loss, W, X).findings
    lines = range(line_of(layers) + 1, line_of(layers) + 8)
    assert finding.where in [f"{__file__}:{line} (backward)" for line in lines]
    assert "parameter that is stored so to float32, once outside" in finding.cure
    assert rules(functools.partial(layers, 16, True, False), W, X) == []
    assert rules(functools.partial(layers, 64, False, False), W, X) == []
    residual = functools.partial(layers, 512, False, True)
    assert rules(residual, W, X) == []


@pytest.mark.parametrize(
    ("function", "overflows"),
    [
        (jnp.exp, True),
        (lambda h: jnp.exp(jnp.minimum(h, 11)), False),
        (jax.nn.softmax, False),
        (jax.nn.logsumexp, False),
    ],
)
def test_only_an_exp_that_can_overflow_is_said_to(function, overflows):
    def loss(w, x):
        h = function(x.astype(F16) @ w.astype(F16))
        return jnp.mean(h.astype(F32))

    (finding,) = precision_report(loss, W, X).findings
    assert (finding.rule, "overflow" in finding.text) == ("half-exp", overflows)


def test_faults_in_a_backward_rule_stand_at_the_line_of_the_call():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    def backward(x, cotangent):
        return (cotangent * jnp.exp(x),)

    double.defvjp(lambda x: (2 * x, x), backward)

    def loss(w, x):
        h = x.astype(F16) @ w.astype(F16)
        return jnp.mean(double(h).astype(F32))  # !half-exp

    for fun in (loss, jax.jit(loss)):
        report = assert_finds([loss], fun, W, X)
        assert all(f.where.endswith(" (backward)") for f in report.findings)


def test_a_report_leaves_the_rules_of_derivatives_as_they_were():
    @jax.jit
    def solve(w, x):
        def body(state):
            return state[0] + 1, jnp.tanh(state[1] @ w)

        start, steps = (0, x), {"max_steps": 2, "kind": "checkpointed"}
        _, y = equinox_internal.while_loop(lambda s: s[0] < 2, body, start, **steps)
        return y, jnp.sum(y**2)

    def first(w, x):
        return jnp.mean(solve(w, x)[0])

    def both(w, x):
        return sum(map(jnp.sum, solve(w, x)))

    jax.make_jaxpr(jax.grad(first))(W, X)
    precision_report(first, W, X)
    precision_report(both, W, X)
    assert jnp.isfinite(jax.jit(jax.grad(both))(W, X)).all()


def test_findings_stand_in_the_order_of_the_program_with_their_cures():
    def loss(w, x):
        h = x.astype(F16) + w[0].astype(F16)
        e = jnp.exp(h)
        m = jnp.where(h > 0, h, -1e9)
        s = h**2
        return jnp.mean((e + m + s).astype(F32))

    report = precision_report(loss, W, jnp.ones((8192, 8)))
    places = [f"{__file__}:{line_of(loss) + n}" for n in range(5)]
    assert [(f.rule, f.where) for f in report.findings] == [
        ("half-exp", places[2]),
        ("half-constant", places[3]),
        ("half-square", places[4]),
        ("half-sum", f"{places[1]} (backward)"),
    ]
    lines = report.summary().splitlines()
    assert lines[0] == (
        f"warning [half-exp] {places[2]}: Exp in float16 keeps three digits and "
        "overflows at 65,504."
    )
    assert lines[1] == "  Cast its argument to float32."
    assert lines[8:] == ["1 error, 3 warnings", "No matrix products or convolutions."]


def test_a_loss_in_a_library_is_named_by_the_line_of_the_report():
    fun = lambda x: optax.l2_loss(x.astype(F16)).astype(F32).sum()  # noqa: E731
    (finding,) = precision_report(fun, jnp.ones(4)).findings
    assert finding.rule == "half-square"
    assert finding.where == f"{__file__}:{line_of(fun)}"
    report = precision_report(optax.safe_norm, jnp.zeros(4, F16), 1.0)
    assert all(f.where.startswith(f"{__file__}:") for f in report.findings)


def test_shapes_stand_for_arrays_and_nothing_runs():
    def loss(w, x, flag, name):
        assert flag
        assert name == "static"
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return jnp.mean(jnp.exp(product(w, x)))

    shapes = jax.ShapeDtypeStruct(W.shape, F32), jax.ShapeDtypeStruct(X.shape, F32)
    report = precision_report(loss, *shapes, True, "static")
    assert (report.findings, report.half_share) == ((), 1.0)


def with_opaque_operations(w, x):
    x = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, F32), x)
    out = jax.ShapeDtypeStruct(x.shape, F16)
    x = pl.pallas_call(copy, out, interpret=True)(lax.stop_gradient(x.astype(F16)))
    jax.debug.print("{}", x[0, 0])
    x = foreign.bind(x, body=jax.make_jaxpr(lambda a, b: jnp.exp(a))(X, X))
    return jnp.mean(product(w, foreign.bind(x, note="no jaxpr")))


def copy(x_ref, o_ref):
    o_ref[...] = jnp.exp(x_ref[...])


foreign = jax.extend.core.Primitive("foreign")
foreign.def_abstract_eval(lambda x, **params: x)


def test_callbacks_kernels_and_foreign_primitives_are_not_looked_into():
    report = precision_report(with_opaque_operations, W, X)
    first = line_of(with_opaque_operations)
    lines = [f"{__file__}:{first + n}" for n in (1, 3, 5, 6)]
    names = "pure_callback", "pallas_call", "foreign", "foreign"
    assert report.findings == ()
    assert report.half_share == 1.0
    assert report.not_looked_into == (*zip(names, lines, strict=True),)
    assert f"Not looked into: pallas_call at {lines[1]}." in report.summary()


def test_what_equinox_marks_is_not_listed():
    def loss(w, x):
        is_large = equinox_internal.unvmap_any(x > 2)
        x = equinox_internal.nonbatchable(jnp.where(is_large, x, 1))
        return jnp.mean(product(w, equinox_internal.nondifferentiable_backward(x)))

    assert precision_report(loss, W, X).not_looked_into == ()


def test_the_bias_of_a_convolution_in_a_library_is_a_note_at_its_line():
    conv = eqx.nn.Conv2d(1, 8, 3, key=jax.random.key(0))

    def loss(conv, x):
        half = jmp_scale.cast_to_half(conv)
        return jnp.mean(jax.vmap(half)(x.astype(F16)).astype(F32) ** 2)

    options = {"transform": eqx.filter_value_and_grad}
    (finding,) = precision_report(loss, conv, jnp.ones((32, 1, 14, 14)), **options)[0]
    assert (finding.rule, finding.level) == ("half-sum", "note")
    assert finding.where.startswith(f"{__file__}:")
    assert "(in equinox/" in finding.text


def exp_in_a_scan(w, x):
    step = lambda h, _: (jnp.exp(h @ w.astype(F16)), None)  # noqa: E731
    return jnp.mean(lax.scan(step, x.astype(F16), None, length=3)[0].astype(F32))


def test_an_unreadable_scan_is_walked_through_and_said_to_be_unread(monkeypatch):
    monkeypatch.setattr(jmp_scale._jaxpr, "loop_of", lambda eqn: None)
    report = precision_report(exp_in_a_scan, W, X)
    assert [name for name, _ in report.not_looked_into] == ["scan"]
    assert rules(exp_in_a_scan, W, X) == ["half-exp"]
