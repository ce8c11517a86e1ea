"""`benchmarks/half_parameters.py`: its command runs, and its forms do what they say."""

import os

import half_parameters
import jax
import jax.numpy as jnp
import optax
import pytest


def last(form, steps=300):
    """A parameter after steps of 2^-12 from 1, where bfloat16 has steps of 2^-7."""
    tx = half_parameters.FORMS[form].wrap(optax.sgd(2.0**-12), None)
    params = jnp.ones(3, jnp.bfloat16)
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(-jnp.ones_like(params), state, params)
        params = optax.apply_updates(params, updates)
    assert params.dtype == jnp.bfloat16
    return params


@pytest.mark.parametrize("form", ["float32 copy", "Kahan sum", "remainder"])
def test_forms_that_keep_something_lose_no_update(form):
    assert (last(form) == jnp.bfloat16(1 + 300 * 2.0**-12)).all()


@pytest.mark.parametrize("form", ["naive", "naive, float32 moments"])
def test_naive_forms_lose_every_small_update(form):
    assert (last(form) == 1).all()


@pytest.mark.parametrize("form", half_parameters.FORMS)
def test_a_state_has_the_bytes_of_the_table(form):
    wrap, (_, beside, moments), dtype = half_parameters.FORMS[form]
    state = wrap(optax.adamw(1e-3), jax.random.key(0)).init(jnp.ones(1000, dtype))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert size // 1000 == beside + moments


def test_the_command_tabulates_bytes_losses_and_curves(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    options = "--rates 1e-3 --seeds 2 --steps 3 --forms"
    options = ["--tasks", "digits", *options.split()]
    half_parameters.main([*options, "float32 parameters", "stochastic"])
    printed = capsys.readouterr().out
    assert "| remainder | 2 | 2 | 8 | 2 | 14 |" in printed
    _, _, losses = printed.partition("### digits, learning rate 1e-3\n")
    assert losses.count("| as float32 |") == 2
    curve = losses.partition(", by step")[2]
    assert [line.count("|") for line in curve.strip().splitlines()] == [4] * 5
