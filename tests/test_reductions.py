"""Each machine's way to reduce, run on this one: the values do not depend on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_scale import _finite, _reductions, _squares

MACHINES = ["cpu", "gpu", "tpu"]

# More of one shape than a group holds, arrays for the TPU's matrix unit, and others.
SHAPES = [(8, 3)] * 11 + [(512, 256), (2, 256, 384), (3, 7, 8192), (5,), (5,), ()]


@pytest.fixture(params=MACHINES)
def machine(request, monkeypatch):
    """Programs are as lowered for this machine."""

    def of_machine(*args, default=None, **variants):
        return variants.get(request.param, default)(*args)

    monkeypatch.setattr(_reductions.lax, "platform_dependent", of_machine)
    return request.param


def arrays(dtype=np.float32):
    rng = np.random.RandomState(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in SHAPES]


def flag_and_norm(tree):
    # A new function for each call: `jax.jit` would find another machine's program.
    return jax.jit(lambda tree: _finite.finite_and_norm(tree))(tree)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
def test_finite_arrays_are_finite(dtype):
    given = arrays(dtype)
    assert _reductions.all_finite_here(given)
    assert flag_and_norm(given)[0]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_one_bad_entry_of_any_array_is_seen(bad):
    @jax.jit
    def flags(given):
        return _reductions.all_finite_here(given), _finite.finite_and_norm(given)

    good = arrays()
    for position, array in enumerate(good):
        given = list(good)
        given[position] = array.at[(-1,) * array.ndim].set(bad)
        finite, (finite_too, norm) = flags(given)
        assert not finite
        assert not finite_too
        assert norm == np.inf


@pytest.mark.parametrize("size", [1.0, 1e-10, 1e30])
def test_the_norm_is_right(size, machine):
    given = [size * array for array in arrays()]
    finite, norm = flag_and_norm(given)
    assert finite
    # On a TPU larger entries count as this one.
    largest = _squares.LARGEST_ON_TPU if machine == "tpu" else np.inf
    least = [np.minimum(np.abs(np.asarray(x, np.float64)), largest) for x in given]
    exact = np.sqrt(sum((x**2).sum() for x in least))
    # What a GPU and a TPU sum in a tree this machine adds one by one.
    np.testing.assert_allclose(norm, exact, rtol=1e-5 if machine == "cpu" else 1e-3)


@pytest.mark.usefixtures("machine")
def test_both_parts_of_complex_numbers_count():
    given = [3 * array + 4j * array for array in arrays()]
    parts = [part for array in given for part in (array.real, array.imag)]
    exact = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in parts))
    np.testing.assert_allclose(flag_and_norm(given)[1], exact, rtol=1e-3)


@pytest.mark.parametrize("count", [2**25, 2**25 + 35, 1, 4097])  # 2**25 + 35 is prime
def test_the_norm_of_many_entries_is_right(count):
    # One float32 to which ones are added does not grow beyond 2**24.
    @jax.jit
    def norm(x):
        return _finite.finite_and_norm(jnp.broadcast_to(x, (count,)))[1]

    np.testing.assert_allclose(norm(jnp.float32(1)), np.sqrt(count), rtol=1e-5)


@pytest.mark.usefixtures("machine")
def test_arrays_of_mixed_types_are_summed_in_the_widest():
    with jax.enable_x64(True):
        given = [
            jnp.full((4, 5), 3e4, jnp.float16),
            jnp.full((4, 5), 1e-3, jnp.float64),
            jnp.full((4, 5), 2.0, jnp.bfloat16),
        ]
        finite, norm = flag_and_norm(given)
    assert finite
    exact = np.sqrt(20 * (float(np.float16(3e4)) ** 2 + 1e-6 + 4))
    np.testing.assert_allclose(norm, exact, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "factor", "column"),
    [(name, 1.0, 0) for name in MACHINES]
    + [(name, _squares.HUGE, 1) for name in MACHINES if name != "tpu"],
)
def test_the_sums_of_squares_of_every_machine_are_right(name, factor, column):
    """Run here: the operations are the same, whatever the machine."""
    shapes = [(7,), (512, 512), (3, 40), (7,), (7,), (), (512, 512), (7,), (7,)]
    random = np.random.RandomState(0)
    arrays = [np.asarray(random.randn(*shape)) for shape in shapes]
    arrays = [np.float32(factor * x / np.sqrt(np.sum(x * x))) for x in arrays]
    copies = range(1, 1 + len(arrays))
    squares = getattr(_squares, f"_squares_on_{name}")
    sums = jax.jit(functools.partial(squares, copies))(*arrays)
    expected = sum(1 / count for count in copies)  # the squares of each sum to 1
    np.testing.assert_allclose(sums[column], expected, rtol=1e-4)  # of 2**18 squares
