"""`recompute` changes what `autocast` keeps, never what it computes."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_checks import flat, jit_with_roundings
from autocast_hostile import HOSTILE, W, X, rms
from autocast_programs import PROGRAMS
from helpers import by_name
from jax import export

from jmp_scale import _cpu, autocast

ALL = {name: (fun, args) for name, (fun, args, *_) in PROGRAMS.items()}
ALL |= {name: (fun, (W, X)) for name, fun in HOSTILE.items()}
assert len(ALL) == len(PROGRAMS) + len(HOSTILE)
MODES = {
    "float16": ("float16", {}),
    "bfloat16": ("bfloat16", {}),
    "mixed": ("float16", {"backward": "bfloat16"}),
}
# A softmax's derivative reads the probabilities that the next product read.
SOFTMAX = "attention softmax scores"


def value_and_gradients(fun, args):
    grads = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]
    program = jit_with_roundings(jax.value_and_grad(fun, argnums=tuple(grads)))
    value, gradients = program(*args)
    return float(value), flat(gradients)


QUICK = [
    ("carry_of_7e6", "float16"),
    ("attention_that_keeps_its_scores", "float16"),
    ("softmax_by_hand", "bfloat16"),
    ("softmax_and_a_rule", "bfloat16"),
    ("softmax_beside_one_that_a_sine_reads", "mixed"),
    ("softmax_of_two_axes", "bfloat16"),
    ("loss_of_a_gradient", "bfloat16"),  # it has a product that nobody reads
]


@pytest.mark.parametrize(
    ("name", "mode"), by_name(QUICK, itertools.product(ALL, MODES))
)
@pytest.mark.filterwarnings("ignore:autocast")
def test_recompute_changes_no_value_and_no_gradient(name, mode):
    (fun, args), (dtype, more) = ALL[name], MODES[mode]
    # What `autocast` adds needs no promotion of dtypes, and no test one of ranks.
    with jax.numpy_dtype_promotion("strict"):
        (value, got), (wanted_value, wanted) = (
            value_and_gradients(autocast(fun, dtype, recompute=r, **more), args)
            for r in (True, False)
        )
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    got, wanted = (np.where(np.isfinite(wanted), g, 0) for g in (got, wanted))
    eps = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    # A last digit of float32 may turn the rounding of a cotangent.
    tolerance = eps if set(SOFTMAX.split()) & set(name.split("_")) else eps / 4
    if mode == "mixed":
        tolerance = 5e-3  # a float16 copy is rounded to bfloat16 once more
    assert value == pytest.approx(wanted_value, rel=1e-5, nan_ok=True)
    size = max(np.linalg.norm(wanted), 1e-30)
    assert np.linalg.norm(got / size - wanted / size) < tolerance


def test_all_machines_compute_the_same(monkeypatch):
    monkeypatch.setattr(_cpu, "takes_bfloat16", lambda: False)

    def loss(w, x):
        h = x + jax.nn.gelu(x @ w) @ w
        return jnp.mean((jax.nn.softmax(rms(h) @ w) @ w + h) ** 2)

    def operations(platform):
        half = autocast(loss, "bfloat16")
        text = export.export(jax.jit(jax.grad(half)), platforms=[platform])(W, X)
        line = r"stablehlo\.(\w+).*?(->.*|: \S+)(?: loc\(.*)$"
        found = re.findall(line, text.mlir_module(), re.M)
        names = "add subtract multiply divide exponential tanh rsqrt dot_general reduce"
        return collections.Counter(f for f in found if f[0] in names.split())

    cpu, cuda, tpu = map(operations, ("cpu", "cuda", "tpu"))
    assert cpu == tpu
    assert not cpu - cuda
    # For one kernel of softmax: p less nothing times its largest entry, which is p.
    nothing = {"reduce": 1, "subtract": 1, "multiply": 1}
    assert {name: n for (name, _), n in (cuda - cpu).items()} == nothing
