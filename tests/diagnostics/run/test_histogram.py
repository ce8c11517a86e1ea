"""Every share of a histogram against casts by NumPy and ml_dtypes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cast_reference import (
    ALL_F16,
    DTYPES,
    assert_same_in_vmap_and_scan,
    everywhere,
    near_ties,
    reference_counts,
)

from jmp_scale import diagnostics

pytestmark = pytest.mark.strict_promotion


histogram_of = jax.jit(diagnostics.exponent_histogram)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ["all float16 bit patterns", "every size", "ties"])
def test_one_histogram_has_the_flushed_share_of_every_scale_and_dtype(values, dtype):
    x = {
        "all float16 bit patterns": ALL_F16,
        "every size": everywhere(),
        "ties": near_ties(dtype, 2.0**3),
    }[values]
    log2_scales = np.array([0, 2, 3, 4, 15, 24])
    expected = [reference_counts(x, 2.0**k, dtype)["flushed"] for k in log2_scales]
    shares = histogram_of({"w": x}).flushed_share(log2_scales, dtype)[:, 0]
    nonzero = (np.isfinite(x) & (x != 0)).sum()
    assert np.rint(np.float64(shares) * nonzero).tolist() == expected


def test_entries_are_counted_at_their_exponent():
    x = everywhere()
    histogram = histogram_of([x, x[:0]])
    finite = np.float64(np.abs(x[np.isfinite(x) & (x != 0)]))
    expected = np.bincount(np.frexp(finite)[1] - 1 + 149, minlength=277)
    assert histogram.counts[0].tolist() == expected.tolist()
    assert histogram.exponents[[0, -1]].tolist() == [-149, 127]
    assert not histogram.counts[1].any()


def test_a_histogram_is_the_same_in_vmap_and_scan_and_of_an_empty_tree():
    x = jnp.asarray(everywhere(n=64)).reshape(2, 35)
    assert_same_in_vmap_and_scan(histogram_of, x)
    assert diagnostics.exponent_histogram({}).flushed_share(3).shape == (0,)


@pytest.mark.parametrize(
    ("mode", "wrap"),
    [
        (jax.sharding.AxisType.Auto, jax.jit),
        (jax.sharding.AxisType.Explicit, jax.jit),
        (jax.sharding.AxisType.Explicit, lambda f: f),
    ],
)
def test_reports_of_sharded_leaves_are_those_of_whole_ones(mode, wrap):
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(mode, mode))
    spec = jax.sharding.PartitionSpec("i", "j")
    whole = {"w": everywhere()[:20_000].reshape(40, 500), "b": np.ones(3, np.float32)}
    sharding = jax.sharding.NamedSharding(mesh, spec)
    sharded = whole | {"w": jax.device_put(whole["w"], sharding)}
    report = lambda x: diagnostics.grad_report(x, 2.0**4)  # noqa: E731
    for tool in (diagnostics.exponent_histogram, report):
        chex.assert_trees_all_equal(wrap(tool)(sharded), jax.jit(tool)(whole))


def test_a_histogram_refuses_scales_that_are_not_whole_powers_of_two():
    histogram = diagnostics.exponent_histogram(jnp.ones(2))
    with pytest.raises(TypeError, match="whole numbers, got float32"):
        histogram.flushed_share(1.5)
    with pytest.raises(ValueError, match="flushed_share: expected dtype to be one"):
        histogram.flushed_share(1, "int8")
