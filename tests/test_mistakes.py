"""Mistakes of newcomers: each error says what was expected, got, and what to write.

One table: a row is a call, and words of its error. What only one module can make wrong
(a map over devices, a checkpoint) is beside the tests of that module.
"""

import math
import re

import equinox
import jax
import jax.numpy as jnp
import jmp
import optax
import pytest
from flax import linen, nnx
from flax.training.dynamic_scale import DynamicScale

import jmp_scale
import jmp_scale.checkpoints
import jmp_scale.nnx
from jmp_scale import DynamicLossScale, SpikeGuard, StaticLossScale, with_loss_scale

NAN = math.nan


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def gradient_of(fun, **options):
    return jmp_scale.grad(fun, StaticLossScale(8.0), **options)(jnp.ones(()))


def step(state=None, grads=None, **extra_args):
    """A step of Adam with these extra arguments, the state or gradients of another."""
    tx = with_loss_scale(ADAM)
    grads = PARAMS if grads is None else grads
    return tx.update(grads, state or tx.init(PARAMS), PARAMS, **extra_args)


X, PARAMS = jnp.ones((4, 4)), jnp.ones(2)
HALF, KEY = jmp_scale.autocast(loss, "bfloat16"), jax.random.key(0)
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
TX, FLAX = with_loss_scale(SGD), DynamicScale()
DROPOUT, DENSE = equinox.nn.Dropout(), linen.Dense(3)
NETWORK = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
STATE = TX.init(PARAMS)
JMP = jmp.DynamicLossScale(X[0, 0])
BF16 = {"w": PARAMS.astype(jnp.bfloat16)}
EXACT = jmp_scale.with_half_storage(ADAM)  # with remainders
ADAMS = {"averages": ("mu", "nu"), "key": KEY}
AVERAGED = jmp_scale.with_half_storage(ADAM, **ADAMS)
DRAWN = jmp_scale.with_half_storage(ADAM, remainders=False, key=KEY)
EXACT_STATE = EXACT.init(BF16)
# Arguments and wrong values of each class, all of them with words that are theirs.
ARGUMENTS = {
    DynamicLossScale: {
        "period": (0, 2.5, NAN, 2**31, 10**400, "2000", None, True),
        "factor": (1, math.inf, "2", 2j),
        "backoff_factor": (0, 1, NAN, "half"),
        "min_loss_scale": (-1, math.inf, 2.0**25),
        "max_loss_scale": (0, NAN, math.inf),
        "loss_scale": (0.0, NAN, 0.5, 10**400, "2**15", 2j, [2.0], True),
        "growth_delay": (-1, 0.5),
        "hysteresis": (0, 1.5),
        "counter": (2**31, -(2**31) - 1, NAN, 3.7, "0", False),
        "hysteresis_left": (2**31,),
        "hysteresis_reset": ("never", 1),
        "at_max": ("stop",),
    },
    StaticLossScale: {"loss_scale": (0, NAN, 2.0**127, 2.0**-127, None, "8", True)},
    SpikeGuard: {
        "threshold": (0, NAN, math.inf, "6"),
        "decay": (0, 1.0, NAN),
        "warmup": (-1, 1.5),
        "max_in_a_row": (0, None),
    },
}


@pytest.mark.parametrize(
    ("kind", "argument"),
    [(kind, name) for kind, of in ARGUMENTS.items() for name in of],
)
def test_a_wrong_argument_is_an_error_that_names_it_and_its_value(kind, argument):
    others = {"hysteresis": 2} if kind is DynamicLossScale else {}
    message = rf"(?s)^{kind.__name__}: expected {argument} to be .*, got "
    for value in ARGUMENTS[kind][argument]:
        with pytest.raises((TypeError, ValueError), match=message) as raised:
            kind(**others | {argument: value})
        assert str(raised.value).endswith(repr(value))


# A call, and words of its error.
MISTAKES = r"""
autocast(loss, "bfloat16", keep_float32=True)
    keep_float32 to be a name or .*, got a bool True; .*keep_float32\(fun\)
autocast(loss, "bfloat16", keep_float32=["a", DROPOUT])
    tuple of names, got a Dropout .*keep_float32\(fun\)
autocast("bfloat16")
    got a str; write autocast\(loss_fn.* not a context manager
autocast(nnx.Linear, "bfloat16")
    got the class Linear; .*lambda model, x: loss\(model\(x\)\)
autocast(DENSE, "bfloat16")
    got a Dense; .*of Linen lambda params, x: loss\(model.apply\(params, x\)\)
autocast(loss, "bfloat16", recompute="False")
    expected recompute to be True or False, got 'False'
jax.jit(diagnostics.compare_gradients, static_argnums=(0, 1))(HALF, loss, X, X)
    compare_gradients: expected arrays with values, got traced .*outside of jax
jax.jit(lambda p: DynamicLossScale(period=p))(3)
    concrete
DynamicLossScale(0.7, min_loss_scale=0.8, max_loss_scale=0.7)
    min_loss_scale to be at most max_loss_scale = 0.7, got 0.8
get_loss_scale("dynamics")
    known are "none"; "dyn
get_loss_scale(jnp.ones(2))
    loss_scale to be a real num
get_loss_scale("f16:2")
    unknown loss scale
get_loss_scale("dynamic:0")
    expected loss_scale to be
get_loss_scale("-2**.5")
    unknown loss scale '-2
get_loss_scale(DynamicLossScale)
    got <class .*Scale'>; pass an instance
diagnostics.LossScaleHistory.create(0)
    create: expected capacity to be an integer in \[1, .*, got 0
diagnostics.sensitive_products(loss, X, X, tolerance=-1.0)
    expected tolerance to be a number >= 0, got -1.0
presets.deepspeed(2000)
    ^deepspeed: expected initial_scale_power to be a number in \[-126, 126\]
presets.deepspeed("8")
    be a real number, got '8'
presets.apex("8")
    loss_scale to be a real number, got '8'
presets.flax(growth_interval="5")
    flax: expected growth_interval to be a real number, got '5'
presets.cerebras(steps_per_increase="5")
    cerebras: expected steps_per_increase to be a real number, got '5'
presets.apex(max_loss_scale="8")
    max_loss_scale to be a real number, got '8'
get_loss_scale({"fp16": {"loss_scale": 0}})
    got the section \{.*; pass one value of it, or .* jmp_scale.presets
DynamicLossScale().adjust({"w": X})
    grads_finite to be a boolean .*, got a dict; write adjust\(all_finite\(grads
grad(loss, 1024.0)
    ^grad: expected .* got 1024.0; pass .*get_loss_scale\(...\) of a number
value_and_grad(loss, DynamicLossScale)
    ^value_and_grad: expected .*got <class .*Scale'>; pass an instance
grad(loss, STATE)
    got a LossScaleState; .* the .loss_scale of
grad(loss, JMP)
    loss scale, got jmp.DynamicLossScale; write import jmp_scale as jmp in
get_loss_scale(JMP)
    loss scale, got jmp.DynamicLossScale; write import jmp_scale as jmp in
value_and_grad(loss, FLAX)
    got flax.DynamicScale; write jmp_scale.presets.flax\(scale=
grad(loss, type("DynamicScale", (), {})())
    got a DynamicScale; pass an instance such as
grad(loss, (0, 1))
    second argument, got \(0, 1\); argnums is the third: grad\(fun, loss_
value_and_grad(jnp.ones(()), STATE.loss_scale)
    expected a function, got an array .*value_and_grad\(loss_
gradient_of(lambda w: w * jnp.ones(2))
    ^grad: expected fun .*got an array of shape \(2,\); return its mean
gradient_of(lambda w: (w, {}))
    loss, got a tuple of length 2; .* pass has_aux
gradient_of(lambda w: w, has_aux=True)
    \(loss, aux\) .* got an array of shape \(\); return
all_finite(loss)
    all_finite: expected arrays, got a function; pass what it returns
value_and_grad(loss, STATE.loss_scale, PARAMS, X)
    ^value_and_grad: expected argnums .*write value_and_grad\(fun, loss_sc
grad(loss, STATE.loss_scale, 0, X)
    ^grad: expected argnums and has_aux .*got arrays
gradient_of(lambda w: w, transform=jax.grad)
    ^grad: expected transform to return \(\(value, aux\), grads\)
select_tree({"w": X}, True, {"w": X})
    scalar as pred, got a dict; write select_tree\(pred, on_true, on_false\)
all_finite({"w": X}, specs={"w": None})
    all_finite: expected a PartitionSpec .*PartitionSpec\(\) for one that is wh
get_policy(None)
    got None; write get_policy\(
TX.update(PARAMS, STATE, PARAMS, X)
    state, params, value=loss\), got update\(ArrayImpl, LossScaleState, .*, ArrayImpl
TX.update(None, STATE, PARAMS)
    state, params, value=loss\), got update\(NoneType, LossScaleState, ArrayImpl\)
with_loss_scale(SGD, guard=6.0)
    guard to be a SpikeGuard, got .*write guard=jmp_scale.SpikeGuard\(
with_half_storage(ADAM, averages="mu", key=KEY)
    averages to be a tuple of names, got .*write averages=\("mu", "nu"\)
with_half_storage(ADAM, averages=True, key=KEY)
    averages to be a tuple of names, got .*write averages=\("mu", "nu"\)
with_half_storage(ADAM, averages=("mu",), key=0)
    expected one PRNG key, got .*; write key=jax.random.key\(0\)
with_half_storage(ADAM, averages=("mu",), key=jax.random.split(KEY))
    expected one PRNG key, got .*; write key=jax.random.key\(0\)
with_half_storage(ADAM, averages=("mu",), key=jax.random.split(jax.random.PRNGKey(0)))
    expected one PRNG key, got .*; write key=jax.random.key\(0\)
with_half_storage(ADAM, averages=["mu"])
    ^with_half_storage: expected a key .*got None
EXACT.init(PARAMS)
    neither, so nothing would be stored
EXACT.init({"b": jnp.float16(1)})
    got b of float16: with its remainder it takes 6 bytes, .* takes 4
with_half_storage(ADAM, averages=("mu", "trace"), key=KEY).init(PARAMS)
    called \['trace'\], .* got one with mu \(float32\), nu
with_half_storage(SGD, **ADAMS).init(PARAMS)
    ^with_half_storage: .*got one with no such fields
with_half_storage(with_loss_scale(ADAM), **ADAMS).init(PARAMS)
    write with_loss_scale\(with_half_storage\(optimizer\)\)
EXACT.update(BF16, EXACT_STATE)
    ^with_half_storage: expected the parameters, got None
EXACT.update(BF16, ADAM.init(BF16), BF16)
    ^with_half_storage: expected the HalfStorageState .*got
DRAWN.update(BF16, AVERAGED.init(BF16), BF16)
    same averages= and remainders=, got that
AVERAGED.update(BF16, EXACT_STATE, BF16)
    same averages= and remainders=, got that
EXACT.update(BF16, EXACT_STATE, {})
    ^with_half_storage: expected parameter w .*got none
AVERAGED.update(BF16, AVERAGED.init({"w": PARAMS}), BF16)
    parameter w to be float32, by the remainders in .*got bfloat16.*as init got
full_parameters(STATE, PARAMS)
    full_parameters: expected the parameters first, .*\(params, opt_state\)
checkpoints.without_half_storage(EXACT_STATE, PARAMS)
    without_half_storage: expected the parameters first, .*\(params, opt_state\)
checkpoints.restore("path", STATE)
    restore: expected a function, got a str; write restore\(lambda template
checkpoints.restore(STATE, lambda template: template)
    restore: expected a function, .*; write restore\(lambda template
jmp_scale.nnx.Optimizer(ADAM, NETWORK)
    inner to be an optax.GradientTransformation, got a Linear; pass the optimizer
jmp_scale.nnx.Optimizer(NETWORK, ADAM).update(nnx.state(NETWORK), {"a": [NETWORK]})
    expected the model before its gradients, got State and dict; write optimizer.up
with_loss_scale(SGD, 8.0)
    with_loss_scale: expected a loss scale, got 8.0
step(value=PARAMS)
    value to be the scalar.* alone
step(value=(1.0, {}))
    value to be the scalar.* alone
step(loss=1.0)
    expected the loss as value=, got loss=
step(grads=[PARAMS])
    of the structure of the parameters
step(optax.adam(0.1).init(PARAMS))
    update\(grads, state, params, value=loss\), got .*, tuple, .*checkpoints.restore
all_finite(X, {"i", "j"})
    all_finite: expected axis_name to be the name of a mesh axis
"""


@pytest.mark.parametrize(
    ("call", "words"), re.findall(r"^(\S.*)\n    (.*)$", MISTAKES, re.MULTILINE)
)
def test_a_mistake_is_an_error_that_says_what_to_write(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        eval(call, {**vars(jmp_scale), **globals()})


def test_the_name_of_pytorch_leads_to_ours():
    words = r"write jmp_scale.with_loss_scale\(tx, jmp_scale.Dynamic"
    with pytest.raises(AttributeError, match=words):
        _ = jmp_scale.GradScaler
    with pytest.raises(ImportError, match=words):
        from jmp_scale import GradScaler  # noqa: F401
    assert not hasattr(jmp_scale, "GradScaler")
