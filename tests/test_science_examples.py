"""The examples about science show what they say, and the spread over seeds.

What is asserted holds by a wide margin: CPUs round float16 at different places.
"""

import importlib

import jax
import pytest
from test_examples import EXAMPLES, columns, processes

import jmp_scale
from jmp_scale import diagnostics

DTYPES = ("float32", "bfloat16", "float16", "float16, dynamic", "float16, cap of 2^40")


@pytest.fixture(scope="module")
def table():
    """The rows that an example prints, in a process of its own.

    The flags of XLA that the examples set are read once in a process.
    """
    with processes() as start:
        run = start()
        yield lambda *args: columns(run(*args), DTYPES)


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the examples into this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.mark.slow
def test_a_differential_equation_needs_loss_scaling_in_float16(table):
    rows = table("pinn.py")
    errors = {name: list(map(float, cells[:3])) for name, cells in rows.items()}
    assert all(least <= mid <= largest for mid, least, largest in errors.values())
    median = {name: values[0] for name, values in errors.items()}
    for name in ("float16, dynamic", "float16, cap of 2^40"):
        assert median[name] < 2 * median["float32"]
        assert median[name] < median["float16"] / 2
    assert [rows[name][3:] for name in DTYPES[:3]] == [["2^0", "0"]] * 3
    assert rows["float16, dynamic"][3:] == ["2^24", "0"]
    assert int(rows["float16, cap of 2^40"][3].removeprefix("2^")) > 24


def test_a_loss_scale_saves_the_gradients_of_second_derivatives(example):
    digits, pinn = example("_digits"), example("pinn")
    params = digits.init_layers([1, 24, 24, 1], jax.random.key(0))
    x = jax.random.uniform(jax.random.key(1), (pinn.POINTS,))

    @jax.jit
    def zeros(s):
        scale = jmp_scale.DynamicLossScale(s, min_loss_scale=2.0**-7)
        grads = jmp_scale.grad(pinn.loss_fn, scale)(params, x, "float16")
        return digits.zero_share(grads)

    with jax.numpy_rank_promotion("allow"):
        assert zeros(2.0**15) < 0.005
        assert zeros(1.0) > 0.02
        # As the fit gets better, the errors and with them all gradients become less.
        assert zeros(2.0**-7) > 0.5


@pytest.mark.slow
def test_a_gaussian_process_needs_its_distances_in_float32(example):
    process, digits = example("gaussian_process"), example("_digits")
    params = digits.init_layers([4, 64, 64, 8], jax.random.key(1))
    batch = [x[0] for x in process.data(jax.random.key(0), 1)]

    def error(**keep):
        half_loss = jmp_scale.autocast(process.loss_fn, "bfloat16", **keep)
        compared = (half_loss, process.loss_fn, params, *batch)
        return diagnostics.compare_gradients(*compared).error

    with jax.numpy_rank_promotion("allow"):
        # Often infinite: whether the Cholesky factorization fails is a matter of luck.
        assert error() > 0.06
        assert error(keep_float32="distances") < 0.03


@pytest.mark.slow
def test_sampling_and_learning_differ_by_the_digits_of_the_dtype(table):
    rows = table("policy_gradient.py", "--steps", 100, "--seeds", 2)
    mismatch = {name: float(cells[0]) for name, cells in rows.items()}
    assert mismatch["float32"] < 1e-5
    assert 1e-4 < mismatch["float16"] < 2e-3
    # Before training a loss scale has changed nothing.
    assert mismatch["float16, dynamic"] == mismatch["float16"]
    assert 3 < mismatch["bfloat16"] / mismatch["float16"] < 20  # three bits are 8
    assert all(float(cells[1]) > 0.4 for cells in rows.values())  # 1/16 by chance
