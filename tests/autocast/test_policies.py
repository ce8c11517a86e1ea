"""What policies of `jax.checkpoint` save of a cast program, around it and within."""

import collections

import jax
import jax.numpy as jnp
import pytest
from autocast_checks import (
    assert_norm_close,
    jit_with_roundings,
    transposes_checkpoints,
    what_is_read,
)
from autocast_programs import mean_square
from helpers import by_name, slow
from jax.ad_checkpoint import checkpoint_name

from jmp_scale import _jaxpr, autocast

N, LAYERS = 16, 3
POLICIES = jax.checkpoint_policies
X = jnp.linspace(-1, 1, 8 * N).reshape(8, N)
WS = [jnp.sin(jnp.arange(N * N) + i).reshape(N, N) / 2 for i in range(LAYERS)]


def layer(w, x):
    return jnp.tanh(jax.nn.gelu(checkpoint_name(x @ w, "product")) * 1.5)


def loss(ws, x, layer=layer):
    for w in ws:
        x = layer(w, x)
    return mean_square(x)


def within(policy):
    one = jax.checkpoint(layer, policy=policy)
    return lambda ws, x: loss(ws, x, one)


FORMS = {
    "around": lambda policy, **how: jax.checkpoint(
        autocast(loss, "bfloat16", **how), policy=policy
    ),
    "within": lambda policy, **how: autocast(within(policy), "bfloat16", **how),
}
SAVING = {
    "dots_saveable": POLICIES.dots_saveable,
    "dots_with_no_batch_dims_saveable": POLICIES.dots_with_no_batch_dims_saveable,
    "everything_saveable": POLICIES.everything_saveable,
    "names": POLICIES.save_only_these_names("product"),
}
OFFLOADING = {
    "names": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots": POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def counted(fun, *args):
    """How many operations of each kind a program has, without what nothing reads."""
    found = _jaxpr.equations(what_is_read(jax.make_jaxpr(fun)(*args)))
    return collections.Counter(e.primitive.name for e in found)


def products(fun, *args):
    return counted(fun, *args)["dot_general"]


@pytest.mark.parametrize("recompute", [True, slow(False)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", SAVING)
@transposes_checkpoints
def test_a_product_that_is_saved_is_run_once_and_saved_in_half(policy, form, recompute):
    cast = FORMS[form](SAVING[policy], recompute=recompute)
    # The first layer's input has no gradient.
    assert products(jax.value_and_grad(cast), WS, X) == 3 * LAYERS - 1
    saved = [x for x in jax.tree.leaves(jax.vjp(cast, WS, X)[1]) if x.shape == X.shape]
    halves = [x for x in saved if x.dtype == jnp.bfloat16]
    assert LAYERS <= len(halves) <= LAYERS + 1
    if form == "around" and policy != "everything_saveable":
        assert len(saved) == LAYERS + 1  # and the input


@transposes_checkpoints
def test_within_a_policy_that_alone_says_what_is_recomputed():
    cast = FORMS["within"](POLICIES.everything_saveable)
    assert counted(jax.value_and_grad(cast), WS, X)["tanh"] == 2 * LAYERS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", [*OFFLOADING, "nothing"])
def test_a_product_that_is_offloaded_is_run_once_and_an_unsaved_one_twice(policy, form):
    cast = FORMS[form](OFFLOADING.get(policy, POLICIES.nothing_saveable))
    # There a policy that chooses by primitive has them recomputed: memory.md says so.
    with_flag = policy == "dots" and getattr(jax.config, "jax_remat3", False)
    wanted = (4 if policy == "nothing" or with_flag else 3) * LAYERS - 1
    assert products(jax.value_and_grad(cast), WS, X) == wanted


def gradient(fun):
    return jnp.stack(jit_with_roundings(jax.grad(fun))(WS, X))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "policy",
    by_name([SAVING["names"]], [POLICIES.nothing_saveable, *SAVING.values()]),
)
def test_a_policy_changes_no_gradient(form, policy):
    got, wanted = map(gradient, (FORMS[form](policy), autocast(loss, "bfloat16")))
    assert_norm_close(got, wanted, 2.0**-10)


@pytest.mark.parametrize("recompute", [True, slow(False)])
@pytest.mark.parametrize("policy", ["dots_saveable", "names"])
@transposes_checkpoints
def test_a_float32_result_is_saved_as_it_is(policy, recompute):
    how = {"recompute": recompute, "float32_results": "layer"}
    saving = FORMS["around"](SAVING[policy], **how)
    got, wanted = map(gradient, (saving, autocast(loss, "bfloat16", **how)))
    assert_norm_close(got, wanted, 2.0**-10)
    saved = jax.tree.leaves(jax.vjp(saving, WS, X)[1])
    assert [x.dtype for x in saved if x.shape == X.shape] == ["float32"] * (LAYERS + 1)
