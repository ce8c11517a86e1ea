"""`benchmarks/half_parameters.py`: its command runs, and states have its bytes."""

import os

import half_parameters
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
