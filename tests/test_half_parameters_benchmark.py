"""`benchmarks/half_parameters.py` and `half_states.py` run, states have the bytes."""

import os

import half_parameters
import half_states
import jax
import jax.numpy as jnp
import optax
import pytest


@pytest.mark.parametrize("form", half_parameters.FORMS)
def test_a_state_has_the_bytes_of_the_table(form):
    wrap, (_, beside, moments), dtype = half_parameters.FORMS[form]
    state = wrap(optax.adamw(1e-3), jax.random.key(0)).init(jnp.ones(1000, dtype))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert size // 1000 == beside + moments


@pytest.mark.slow
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


@pytest.mark.parametrize("name", half_states.ROWS)
def test_all_forms_of_a_state_round_the_same_averages(name):
    make, names, _ = half_states.ROWS[name]
    params, key = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}, jax.random.key(0)
    plain, nearest, stochastic = (
        jax.eval_shape(
            lambda params, wrap=wrap: wrap(make(lambda _: 1e-3), names, key).init(
                params
            ),
            params,
        )
        for wrap in half_states.FORMS.values()
    )
    assert jax.tree.map(lambda x: x.dtype, nearest) == jax.tree.map(
        lambda x: x.dtype, stochastic.inner_state
    )
    halves = [x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nearest)]
    assert sum(halves) in (2, 3, 4)
    assert {x.dtype for x in jax.tree.leaves(plain)}.isdisjoint({jnp.dtype("bfloat16")})


@pytest.mark.slow
def test_the_command_tabulates_losses_and_changes_by_rounding(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    options = "--seeds 2 --steps 20 --optimizers Lion"
    half_states.main(options.split())
    printed = capsys.readouterr().out
    header = (
        "| optimizer | rate | float32 | to nearest | stochastic | change, to nearest"
    )
    assert header in printed
    row = next(line for line in printed.splitlines() if line.startswith("| Lion"))
    assert row.count("%") == 2
    curve = printed.partition("### Lion, learning rate 1e-3, by step\n\n")[2]
    assert curve.startswith("| step | float32 | to nearest | stochastic |")
