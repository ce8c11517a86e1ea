"""`benchmarks/half_storage.py` tabulates losses, changes and curves."""

import os

import half_storage
import jax
import jax.numpy as jnp
import pytest


@pytest.mark.parametrize("name", half_storage.ROWS)
def test_all_forms_of_a_state_round_the_same_averages(name):
    params, key = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}, jax.random.key(0)
    forms = half_storage.forms_of(half_storage.ROWS[name]).values()
    plain, nearest, stochastic = (
        jax.eval_shape(form.make(lambda _: 1e-3, key).init, params) for form in forms
    )
    dtypes = [x.dtype for x in jax.tree.leaves(nearest)]
    assert dtypes == [x.dtype for x in jax.tree.leaves(stochastic.inner_state)]
    assert dtypes.count(jnp.bfloat16) in (2, 3, 4)
    assert jnp.bfloat16 not in [x.dtype for x in jax.tree.leaves(plain)]


@pytest.mark.slow
def test_the_command_tabulates_losses_changes_and_curves(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    options = "--tasks digits --rates 1e-3 --seeds 2 --steps 20 --optimizers Lion"
    half_storage.main(options.split())
    printed = capsys.readouterr().out
    losses = printed.partition("### digits, learning rate 1e-3\n")[2]
    assert losses.count("| as float32 |") >= 2
    curve = losses.partition(", by step\n\n")[2]
    assert curve.startswith("| step | float32 parameters | naive | remainder | stoch")
    row = next(line for line in printed.splitlines() if line.startswith("| Lion"))
    assert row.count("%") == 2
    curve = printed.partition("### Lion, learning rate 1e-3, by step\n\n")[2]
    assert curve.startswith("| step | float32 | to nearest | stochastic |")
