"""`precision_report` finds planted faults at their lines, wherever they run."""

import jax
import jax.numpy as jnp
import precision_faults as faults
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from precision_checks import assert_finds, planted

from jmp_scale.diagnostics import precision_report

# One or two of each rule: the others differ in the operation, not in where it runs.
SOME = [
    faults.sum_in_float16,
    faults.gradient_of_a_broadcast_bias,
    faults.cumulative_sum,
    faults.square,
    faults.variance,
    faults.exponential,
    faults.softmax,
    faults.mask_constant,
    faults.mask_by_full,
    faults.mask_by_scalar_type,
    faults.epsilon_in_a_division,
    faults.epsilon_in_a_root_below,
    faults.integers,
    faults.loop_counter,
    faults.running_sum,
    faults.moving_average,
    faults.round_trip,
]


@pytest.fixture(autouse=True)
def _ranks_promote():
    with jax.numpy_rank_promotion("allow"):
        yield


def mean(array):
    return jnp.mean(array.astype(jnp.float32))


def in_jit(fault):
    return jax.jit(lambda x: mean(jax.jit(fault)(x)))


def in_scan(fault):
    def over_rows(x):
        rows = jnp.stack([x, x + 1, x + 2])
        return lax.scan(lambda c, row: (c, mean(fault(row))), 0.0, rows)[1]

    return over_rows


def in_while(fault):
    def until_three(x):
        def body(state):
            return state[0] + 1, jnp.maximum(state[1], mean(fault(x)))

        return lax.while_loop(lambda s: s[0] < 3, body, (0, 0.0))[1]

    return lambda x: until_three(lax.stop_gradient(x))


def in_cond(fault):
    def one_or_other(x):
        return lax.cond(x[0] > 0, lambda x: mean(fault(x)), lambda x: mean(x + 1), x)

    return one_or_other


def in_remat(fault):
    return jax.jit(in_scan(jax.checkpoint(fault)))


def in_custom_vjp(fault):
    @jax.custom_vjp
    def function(x):
        return fault(x)

    def forward(x):
        return fault(x), x

    def backward(x, cotangent):
        return jax.vjp(fault, x)[1](cotangent)

    function.defvjp(forward, backward)
    return function


def in_custom_jvp(fault):
    @jax.custom_jvp
    def function(x):
        return fault(x)

    @function.defjvp
    def rule(primals, tangents):
        return jax.jvp(fault, primals, tangents)

    return function


def in_vmap(fault):
    return lambda x: jax.vmap(lambda x: mean(fault(x)))(jnp.stack([x, x + 1]))


def in_shard_map(fault):
    mesh = jax.make_mesh((4,), ("i",), (jax.sharding.AxisType.Auto,))

    def on_devices(x):
        return jax.shard_map(
            lambda x: mean(fault(x))[None],
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P("i"),
            check_vma=False,
        )(jnp.tile(x, 4))

    return on_devices


def in_pmap(fault):
    return lambda x: jax.pmap(lambda x: mean(fault(x)))(jnp.stack([x, x]))


def in_a_gradient(fault):
    return lambda x: jax.grad(lambda x: mean(fault(x)))(x)


def called_twice(fault):
    return lambda x: mean(fault(x)) + mean(fault(2 * x))


def assert_found(fault, wrap=lambda fault: fault):
    wrapped = wrap(fault)
    return assert_finds([fault], lambda x: mean(wrapped(x)), jnp.ones(64))


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_at_its_line_and_nothing_else(fault):
    assert planted(fault)
    assert_found(fault)


@pytest.mark.parametrize("fault", SOME, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize(
    "wrap",
    [
        in_jit,
        in_scan,
        in_cond,
        in_remat,
        in_custom_vjp,
        in_custom_jvp,
        in_vmap,
        in_shard_map,
        in_pmap,
        in_a_gradient,
        called_twice,
        lambda fault: jax.jit(in_custom_vjp(fault)),
        lambda fault: jax.jit(in_custom_jvp(fault)),
    ],
    ids=lambda wrap: wrap.__name__,
)
def test_a_fault_is_found_wherever_it_runs(fault, wrap):
    assert_found(fault, wrap)


@pytest.mark.parametrize("fault", SOME, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_in_a_while_loop(fault):
    if fault is faults.gradient_of_a_broadcast_bias:
        report = precision_report(lambda x: mean(in_while(fault)(x)), jnp.ones(64))
        assert report.findings == ()  # a while loop has no backward pass
    else:
        assert_found(fault, in_while)


def test_a_second_report_of_a_jitted_function_says_the_same():
    jitted = jax.jit(lambda x: mean(faults.mask_by_full(x) + jax.nn.gelu(x)))
    first = precision_report(jitted, jnp.ones(64))
    assert first.findings == precision_report(jitted, jnp.ones(64)).findings
    assert [f.rule for f in first.findings] == ["half-constant"]
