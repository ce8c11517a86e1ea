"""`precision_report` of float32 programs that `autocast` cast."""

import functools

import jax
import jax.numpy as jnp
import precision_faults as faults
import pytest
from autocast_hostile import HOSTILE, W, X
from autocast_programs import PROGRAMS
from flax import nnx
from helpers import one_of
from losses import examples, of_examples
from precision_checks import reported
from test_precision_clean import F32, array, assert_clean
from test_precision_faults import mean

import jmp_scale.nnx
from jmp_scale.diagnostics import precision_report

pytestmark = pytest.mark.usefixtures("ranks_promote")


ALL = PROGRAMS | {name: (fun, (W, X)) for name, fun in HOSTILE.items()}


def line_of(function):
    return function.__code__.co_firstlineno


@pytest.mark.filterwarnings("ignore:autocast")
def test_a_gradient_that_a_loop_around_autocast_adds_up_stands_at_the_users_line():
    half = jmp_scale.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), "bfloat16")

    def loss(w, xs):
        step = lambda total, x: (total + half(w, x), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, xs)[0]

    args = jnp.ones((8, 8), jnp.bfloat16), jnp.ones((512, 4, 8))
    found = precision_report(loss, *args).findings
    (carry,) = (f for f in found if f.rule == "half-carry")
    assert (carry.file, carry.backward) == (__file__, True)
    assert line_of(loss) < carry.line <= line_of(loss) + 2
    assert "jmp_scale" not in carry.message


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("name", one_of(16, sorted(ALL)))
def test_every_program_is_read_and_where_autocast_has_changed_it(name):
    fun, args, *_ = ALL[name]
    for program in (fun, jmp_scale.autocast(fun, "float16")):
        assert 0 <= precision_report(program, *args).half_share <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast. no product became")
def test_a_float32_program_cast_by_autocast_has_none_of_the_faults(monkeypatch):
    monkeypatch.setattr(faults, "F16", jnp.float32)
    monkeypatch.setattr(faults, "BF16", jnp.float32)
    cast_by_name = {"mask_cast_by_numpy", "epsilon_of_numpy"}
    for name in faults.FAULTS.keys() - cast_by_name:
        function, _ = faults.FAULTS[name]
        in_half = jmp_scale.autocast(lambda x, f=function: mean(f(x)), "float16")
        report = precision_report(in_half, jnp.ones(64))
        assert reported(report) == set(), name
        assert report.not_looked_into == ()


@pytest.mark.slow
def test_the_models_of_the_examples_cast_by_autocast(monkeypatch):
    names = "quickstart", "_digits", "precision_fallback", "pinn"
    quickstart, digits, fallback, pinn = examples(monkeypatch, *names)
    images, labels = array(256, 64), array(256, dtype="int32")
    classifier = digits.init_classifier()
    assert_clean(quickstart.half_loss, [array(8, 8)] * 3, array(32, 8))
    assert_clean(digits.half_loss, digits.init_autoencoder(), images)

    def in_half(fun, *args, **kwargs):
        assert_clean(jmp_scale.autocast(fun, "float16"), *args, **kwargs)

    def classify(params, images, labels):
        logits = digits.network(params, images, "float32")
        return digits.classification_loss(logits, labels)

    in_half(classify, classifier, images, labels)
    params = {"layers": classifier, "t": array()}
    in_half(functools.partial(fallback.loss_fn, dtype=F32), params, images, labels)
    wire = digits.init_layers([1, 16, 16, 1], jax.random.key(0))
    # Of a network with one input, some products are sums, which stay float32.
    bent = functools.partial(pinn.loss_fn, dtype="float32")
    in_half(bent, wire, array(32), half_share=0.971)
    for loss, args, transform in of_examples(monkeypatch):
        module = jmp_scale.nnx if transform is nnx.value_and_grad else jmp_scale
        assert_clean(module.autocast(loss, "float16"), *args, transform=transform)
