"""Random optimizers, trees, dtypes and overflows, against a loop in plain Python.

`pytest tests/test_fuzz.py --hypothesis-profile=long` tries far more of them.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import assert_bitwise_equal, reference_rule

import jmp_scale

# A profile of more examples than Hypothesis's own 100 is meant, here as elsewhere.
EXAMPLES = max(5, hypothesis.settings().max_examples - 100)

TRANSFORMS = {
    "adam": lambda: optax.scale_by_adam(),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
    "ema": lambda: optax.ema(0.9),
    "schedule": lambda: optax.scale_by_schedule(lambda n: 1 / (1 + n)),
    "trace": lambda: optax.trace(0.9, nesterov=True),
}
SHAPES = [(), (3,), (2, 2), (1, 4), (0,)]
BAD = [np.nan, np.inf, -np.inf]
STEPS = st.lists(
    st.sampled_from(["good", "good", "bad gradient", "bad loss", "both"]),
    min_size=1,
    max_size=6,
)


@st.composite
def runs(draw):
    """A run: an optimizer, parameters, and for each step gradients and a loss."""
    names = draw(st.lists(st.sampled_from(sorted(TRANSFORMS)), min_size=1, max_size=3))
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3))
    dtypes = [draw(st.sampled_from(["f2", "f4", "bfloat16"])) for _ in shapes]
    random = np.random.RandomState(draw(st.integers(0, 2**16)))
    params = [jnp.asarray(random.randn(*shape), jnp.float32) for shape in shapes]
    steps = []
    for kind in draw(STEPS):
        grads = [np.asarray(random.randn(*shape), np.float32) for shape in shapes]
        sizes = [g.size for g in grads]
        if kind in ("bad gradient", "both") and max(sizes) > 0:
            leaf = draw(st.sampled_from([i for i, n in enumerate(sizes) if n]))
            place = draw(st.integers(0, sizes[leaf] - 1))
            grads[leaf].reshape(-1)[place] = draw(st.sampled_from(BAD))
        loss = draw(st.sampled_from(BAD)) if kind in ("bad loss", "both") else 1.0
        grads = [jnp.asarray(g, d) for g, d in zip(grads, dtypes, strict=True)]
        steps.append((grads, np.float32(loss)))
    rule = {"period": draw(st.integers(1, 3)), "hysteresis": draw(st.integers(1, 2))}
    return names, params, steps, rule


def all_finite(x):
    return all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves(x))


@functools.partial(jax.jit, static_argnums=0)
def run_of_library(tx, params, steps):
    """Parameters and state after each step, stacked."""

    def step(carry, inputs):
        params, state = carry
        grads, loss = inputs
        updates, state = tx.update(grads, state, params, value=loss)
        carry = optax.apply_updates(params, updates), state
        return carry, carry

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *steps)
    return jax.lax.scan(step, (params, tx.init(params)), stacked)[1]


@hypothesis.given(runs())
@hypothesis.settings(deadline=None, max_examples=EXAMPLES)
def test_any_run_is_that_of_a_loop_in_plain_python(run):
    names, params, steps, rule = run
    inner = optax.chain(*(TRANSFORMS[name]() for name in names), optax.scale(-0.1))
    loss_scale = jmp_scale.DynamicLossScale(2.0**10, **rule)
    tx = jmp_scale.with_loss_scale(inner, loss_scale)
    seen = run_of_library(tx, params, steps)

    grads_finite = [all_finite(grads) for grads, _ in steps]
    loss_finite = [all_finite(loss) for _, loss in steps]
    rule = reference_rule(grads_finite, 2.0**10, loss_finite=loss_finite, **rule)
    plain_params, plain_state = params, inner.init(params)
    skipped, in_a_row, previous = 0, 0, (params, tx.init(params))
    for i, (grads, _) in enumerate(steps):
        new_params, state = jax.tree.map(lambda x, i=i: x[i], seen)
        applied = grads_finite[i] and loss_finite[i]
        assert bool(state.applied) == bool(state.grads_finite) == applied
        if applied:
            in_a_row = 0
            wide = [g.astype(jnp.float32) for g in grads]
            updates, plain_state = inner.update(wide, plain_state, plain_params)
            plain_params = optax.apply_updates(plain_params, updates)
        else:
            skipped, in_a_row = skipped + 1, in_a_row + 1
            assert_bitwise_equal(new_params, previous[0])
            assert_bitwise_equal(state.inner_state, previous[1].inner_state)
        assert (state.skipped, state.skipped_in_a_row) == (skipped, in_a_row)
        assert state.nonfinite_losses == loss_finite[: i + 1].count(False)
        s, counter = state.loss_scale.loss_scale, state.loss_scale.counter
        assert (float(s), int(counter)) == rule[i][:2]
        for a, b in zip(new_params, plain_params, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        previous = new_params, state
