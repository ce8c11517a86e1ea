"""The main programs of the pages run under what JAX has to check a program."""

import contextlib
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import slow

import jmp_scale

ROOT = pathlib.Path(__file__).parents[1]


def program_of(page):
    """The programs of a page."""
    text = (ROOT / page).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M))


PAGES = (
    slow("README.md"),
    slow("docs/flax.md"),
    slow("docs/devices.md"),
    slow("docs/half-parameters.md"),
)


@contextlib.contextmanager
def checkers():
    with (
        jax.checking_leaks(),
        jax.debug_key_reuse(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        yield


def promoting(fun):
    standard = jax.numpy_dtype_promotion("standard")(fun)
    return jax.numpy_rank_promotion("allow")(standard)


def relaxed(make):
    """An optimizer that itself may promote, as Adam of Optax alone does."""

    def made(*args, **kwargs):
        tx = optax.with_extra_args_support(make(*args, **kwargs))
        return optax.GradientTransformationExtraArgs(*map(promoting, tx))

    return made


@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_a_page_passes_the_checkers_of_jax(page, monkeypatch):
    monkeypatch.setattr(optax, "adamw", relaxed(optax.adamw))
    monkeypatch.setattr(optax, "adam", relaxed(optax.adam))
    program = compile(program_of(page), page, "exec")
    if page == "docs/half-parameters.md":  # bfloat16 weights meet float32 inputs
        half = jmp_scale.autocast
        loss = lambda fun, dtype: half(promoting(fun), dtype)  # noqa: E731
        monkeypatch.setattr(jmp_scale, "autocast", loss)
        monkeypatch.setattr(optax, "apply_updates", promoting(optax.apply_updates))
    with checkers():
        exec(program, {"__name__": "page"})


@pytest.mark.slow
def test_half_storage_within_a_loss_scale_and_a_guard_passes_the_checkers_of_jax():
    # Optax itself adds float32 updates to bfloat16 parameters.
    apply_updates = promoting(optax.apply_updates)
    inner = optax.sgd(0.1, momentum=0.9)
    key = jax.random.key(0)
    tx = jmp_scale.with_loss_scale(
        jmp_scale.with_half_storage(inner, averages=["trace"], key=key),
        jmp_scale.DynamicLossScale(2.0**10),
        guard=jmp_scale.SpikeGuard(),
    )

    @functools.partial(jmp_scale.autocast, dtype="float16")
    def loss_fn(params, x):
        return jnp.mean((x @ params["w"].astype(jnp.float32) - 1) ** 2)

    @jax.jit
    def train_step(params, opt_state, x):
        value_and_grad = jmp_scale.value_and_grad(loss_fn, opt_state.loss_scale)
        loss, grads = value_and_grad(params, x)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return apply_updates(params, updates), opt_state

    params = {"w": jnp.ones((4, 2), jnp.bfloat16)}
    with checkers():
        opt_state = tx.init(params)
        for size in (1.0, jnp.inf):
            params, opt_state = train_step(params, opt_state, jnp.full((8, 4), size))
        full = jmp_scale.full_parameters(params, opt_state)
    assert full["w"].dtype == jnp.float32
    assert int(opt_state.skipped) == 1
