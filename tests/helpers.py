"""Independent references in plain Python, comparisons bit by bit, what tests train."""

import re

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import jmp_scale

# The second is infinite in float16, the third makes the loss 900 times as large.
GOOD, OVERFLOWS, LEAPS = 1.0, 3e5, 30.0
GUARD = jmp_scale.SpikeGuard(threshold=50.0, warmup=2)  # far from dropout's noise
ONE_AXIS = jax.make_mesh((8,), ("i",), (AxisType.Auto,))
TWO_AXES = jax.make_mesh((4, 2), ("i", "j"), (AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((8,), ("i",), (AxisType.Explicit,))
EXPLICIT_TWO = jax.make_mesh((4, 2), ("i", "j"), (AxisType.Explicit,) * 2)
# One object: with another transformation a step is compiled again.
TX = jmp_scale.with_loss_scale(
    optax.adam(1e-2), jmp_scale.DynamicLossScale(2.0**10, period=2)
)
GUARDED = jmp_scale.with_loss_scale(
    optax.adam(1e-2), jmp_scale.DynamicLossScale(2.0, period=2), guard=GUARD
)
# A non-finite loss that is given as `value` leaves S alone, as does a spike.
each_skip = pytest.mark.parametrize(
    ("tx", "bad", "with_value"),
    [
        (TX, OVERFLOWS, False),
        pytest.param(GUARDED, LEAPS, True, marks=pytest.mark.slow),
    ],
)


def data(size):
    return jax.random.normal(jax.random.key(1), (16, 4)) * size


def slow(row):
    """The row of a parametrized test, which does not run by default."""
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.slow)


def by_name(quick, rows):
    """Rows of a parametrized test: those named in `quick` run by default."""
    return [*quick, *(slow(row) for row in rows if row not in quick)]


def reference_rule(
    finite,
    loss_scale=2.0**15,
    period=2000,
    factor=2.0,
    min_loss_scale=1.0,
    max_loss_scale=2.0**24,
    backoff_factor=None,
    growth_delay=0,
    hysteresis=1,
    hysteresis_reset="growth",
    at_max="hold",
    loss_finite=None,
):
    """(S, counter, hysteresis left) after each step, in Python numbers."""
    s, counter, left = float(loss_scale), -growth_delay, hysteresis
    history = []
    for step, grads_finite in enumerate(finite):
        if loss_finite is not None and not loss_finite[step]:
            pass
        elif grads_finite:
            counter += 1
            if hysteresis_reset != "growth":
                left = hysteresis
            if counter >= period:
                grown = s * factor
                if grown <= max_loss_scale:
                    s = grown
                elif at_max == "clamp":
                    s = max_loss_scale
                counter = 0
                if hysteresis_reset == "growth":
                    left = hysteresis
        else:
            counter = -growth_delay
            left = max(left - 1, 0)
            if left == 0:
                s = max(
                    s / factor if backoff_factor is None else s * backoff_factor,
                    min_loss_scale,
                )
                if hysteresis_reset == "finite_or_backoff":
                    left = hysteresis
        history.append((s, counter, left))
    return history


def assert_bitwise_equal(actual, expected):
    """Same structure; same dtype, shape and bits (NaN and -0.0 too) in every leaf."""
    actual_leaves, actual_treedef = jax.tree.flatten(actual)
    expected_leaves, expected_treedef = jax.tree.flatten(expected)
    assert actual_treedef == expected_treedef
    for a, b in zip(actual_leaves, expected_leaves, strict=True):
        if jax.dtypes.issubdtype(getattr(a, "dtype", np.float32), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes(), f"{a} is not bitwise {b}"


def count_traces(fun):
    """`fun`, and a list that grows by one at each trace."""
    traces = []

    def counted(*args, **kwargs):
        traces.append(None)
        return fun(*args, **kwargs)

    return counted, traces


def compilations():
    """A list that grows by the name of each program that XLA compiles from now on."""
    names = []

    def count(event, _, **of):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(of.get("fun_name"))

    # It stays: jax 0.8 removes only all listeners, those of other tests among them.
    jax.monitoring.register_event_duration_secs_listener(count)
    return names


def collectives(fun, *args):
    """(operation, result type) of each collective in a function's optimized HLO."""
    operations = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    hlo = fun.lower(*args).compile().as_text()
    found = re.findall(rf"= (.+?) ({operations})(?:-start)?\(", hlo)
    return [(op, re.sub(r"/\*.*?\*/", "", shape)) for shape, op in found]


def varying(tree, axes):
    """In `shard_map`: the same values, whose gradients JAX does not sum over `axes`."""
    if hasattr(lax, "pcast"):
        return lax.pcast(tree, axes, to="varying")
    return jax.tree.map(lambda x: lax.pvary(x, axes), tree)  # jax 0.8


def on_devices(which):
    """A context in which arrays lie on "one device" or may be sharded over "eight"."""
    one = jax.make_mesh((1,), ("i",), (AxisType.Auto,), devices=jax.devices()[:1])
    return jax.set_mesh({"one device": one, "eight devices": ONE_AXIS}[which])


def sharded(tree, mesh, spec):
    return jax.device_put(tree, jax.NamedSharding(mesh, spec))


def on_each_device(x):
    """The values that the devices hold of what should be equal."""
    shards = [np.asarray(shard.data).reshape(-1) for shard in x.addressable_shards]
    return np.concatenate(shards).tolist()
