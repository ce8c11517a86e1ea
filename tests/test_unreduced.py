"""Gradients that devices have not added up yet: `unreduced` on Explicit mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    EXPLICIT,
    EXPLICIT_TWO,
    by_name,
    collectives,
    on_each_device,
    sharded,
    slow,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import jmp_scale
from jmp_scale.diagnostics import metrics

# Of the weight: over which axes its gradient is a sum, and how it is split itself.
MESHES = {
    "1-D": (EXPLICIT, ("i",), P(None, None)),
    "2-D": (EXPLICIT_TWO, ("i",), P(None, "j")),
    "both": (EXPLICIT_TWO, ("i", "j"), P(None, None)),
}
INPUTS = np.random.RandomState(0).normal(size=(3, 16, 4)).astype(np.float32)
WEIGHT = np.random.RandomState(1).normal(size=(4, 6)).astype(np.float32)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


@pytest.mark.parametrize("case", by_name(["1-D", "2-D"], MESHES))
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_micro_batches_are_added_up_and_reduced_once(dtype, case):
    mesh, axes, spec = MESHES[case]
    params = {"w": sharded(WEIGHT, mesh, spec)}
    inputs = sharded(INPUTS, mesh, P(None, axes, None))
    half_loss = jmp_scale.autocast(loss_fn, dtype)

    @jax.jit
    def summed(params, loss_scale, inputs):
        own = {"w": reshard(params["w"], P(*spec, reduced=set(axes)))}
        grad = jmp_scale.grad(half_loss, loss_scale)

        def add(total, x):
            return jax.tree.map(jnp.add, total, grad(own, x)), None

        parts = P(*spec, unreduced=set(axes))
        zeros = {"w": reshard(jnp.zeros(WEIGHT.shape), parts)}
        total, _ = lax.scan(add, zeros, inputs)
        assert jax.typeof(total["w"]).sharding.spec.unreduced == set(axes)
        return jax.tree.map(lambda g: reshard(g, spec), total)

    with jax.set_mesh(mesh):
        args = (params, jmp_scale.DynamicLossScale(2.0**10), inputs)
        # None is in the body of the loop, which has no reduction of an array.
        ((kind, shape),) = collectives(summed, *args)
        got = summed(*args)["w"]
    assert (kind, shape[:6]) == ("all-reduce", "f32[4,")
    gradient = jax.grad(lambda w, x: loss_fn({"w": w}, x))
    expected = np.sum([gradient(WEIGHT, x) for x in INPUTS], 0)
    atol = {"float16": 2e-3, "bfloat16": 2e-2}[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def of_gradient(
    use, case, inputs=INPUTS[0], dtype=jnp.float32, run=lambda fun, *args: fun(*args)
):
    """`use` of a gradient, the sum over the devices of that of their own rows."""
    mesh, axes, spec = MESHES[case]

    def gradient(w, x):
        own = reshard(w, P(*spec, reduced=set(axes)))
        return jax.grad(lambda w: jnp.sum(x @ w).real)(own)

    with jax.set_mesh(mesh):
        w = sharded(jnp.asarray(WEIGHT, dtype), mesh, spec)
        x = sharded(jnp.asarray(inputs, dtype), mesh, P(axes, None))
        return run(jax.jit(lambda w, x: use(gradient(w, x))), w, x)


@pytest.mark.parametrize("case", by_name(["1-D", "both"], MESHES))
@pytest.mark.parametrize("dtype", [jnp.float16, slow(jnp.float32), slow(jnp.complex64)])
def test_each_part_is_multiplied_exactly(case, dtype):
    loss_scale = jmp_scale.DynamicLossScale(2.0**10)

    def use(grads):
        scaled = loss_scale.scale({"w": grads, "step": 3})
        assert scaled["step"] == 3
        back = jmp_scale.unscale(loss_scale, scaled["w"])
        plain = jmp_scale.NoOpLossScale().scale(grads).astype(scaled["w"].dtype)
        return reshard((plain, scaled["w"], back), MESHES[case][2])

    plain, scaled, back = of_gradient(use, case, dtype=dtype)
    assert scaled.dtype == back.dtype == jnp.promote_types(dtype, jnp.float32)
    np.testing.assert_array_equal(scaled, plain * 2.0**10)
    np.testing.assert_array_equal(back, plain)


@pytest.mark.parametrize("case", by_name(["1-D", "both"], MESHES))
def test_a_bad_part_on_one_device_is_known_to_all(case):
    finite = lambda g: jmp_scale.all_finite({"w": g, "b": jnp.ones(2)})  # noqa: E731
    # Each device has two of 16 rows.
    for bad in ({}, {5: np.nan}, {15: np.inf}, {0: np.inf, 15: -np.inf}):
        inputs = INPUTS[0].copy()
        inputs[[*bad], 3] = [*bad.values()]
        answer = of_gradient(finite, case, inputs)
        assert on_each_device(answer) == [not bad] * 8


def test_the_check_of_parts_is_one_scalar_all_reduce():
    found = of_gradient(lambda g: jmp_scale.all_finite([g] * 3), "1-D", run=collectives)
    assert found == [("all-reduce", "pred[]")]


@pytest.mark.parametrize("flag", [True, False])
def test_parts_are_selected_by_a_flag(flag):
    def use(grads):
        selected = jmp_scale.select_tree(jnp.array(flag), grads + grads, grads)
        return reshard((selected, grads), MESHES["2-D"][2])

    selected, grads = of_gradient(use, "2-D")
    np.testing.assert_array_equal(selected, grads * (2 if flag else 1))


ADAMS = {"averages": ("mu", "nu"), "key": jax.random.key(0)}
UPDATES = {
    "with_loss_scale": jmp_scale.with_loss_scale(optax.sgd(0.1)),
    "with_half_storage": jmp_scale.with_half_storage(optax.adam(0.1), **ADAMS),
}


@pytest.mark.parametrize("function", UPDATES)
@pytest.mark.parametrize(("case", "axes"), [("1-D", "'i',"), ("both", "'i', 'j'")])
def test_an_optimizer_refuses_parts_and_says_the_two_ways_on(function, case, axes):
    tx, params = UPDATES[function], {"layer": [jnp.ones((4, 6))]}
    message = (
        rf"^{function}: expected gradients that are added up.* \['layer']\[0] "
        rf"unreduced over \({axes}\); .*sum_gradients\(.*jax.sharding.reshard"
    )
    with pytest.raises(ValueError, match=message):
        of_gradient(lambda g: tx.update({"layer": [g]}, tx.init(params), params), case)


def test_a_norm_of_parts_is_refused():
    state = UPDATES["with_loss_scale"].init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"^global norm: expected .* added up"):
        of_gradient(lambda g: metrics(state, grads=g), "1-D")
