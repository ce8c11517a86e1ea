"""Mistakes of newcomers: each error says what was expected, got, and what to write.

One table: a row is a call, and words of its error. What only one module can make wrong
(a map over devices, a checkpoint) is beside the tests of that module.
"""

import math

import equinox
import jax
import jax.numpy as jnp
import jmp
import optax
import pytest
from flax import linen, nnx
from flax.training.dynamic_scale import DynamicScale
from optimizers import optimizer

import jmp_scale
import jmp_scale.checkpoints
import jmp_scale.nnx
from jmp_scale import (
    DynamicLossScale,
    SpikeGuard,
    StaticLossScale,
    autocast,
    checkpoints,
    diagnostics,
    get_loss_scale,
    with_half_storage,
    with_loss_scale,
)

NAN = math.nan


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def in_a_with(context):
    with context:
        pass


def gradient_of(fun, **options):
    return lambda: jmp_scale.grad(fun, StaticLossScale(8.0), **options)(jnp.ones(()))


def step(state=None, grads=None, **extra_args):
    """A step of Adam with these extra arguments, the state or gradients of another."""
    tx = with_loss_scale(optax.adam(0.1))
    grads = PARAMS if grads is None else grads
    return lambda: tx.update(grads, state or tx.init(PARAMS), PARAMS, **extra_args)


def in_jit(tool, *args):
    return lambda: jax.jit(lambda w: tool(*args, w, X))(X)


X, PARAMS = jnp.ones((4, 4)), jnp.ones(2)
HALF = autocast(loss, "bfloat16")
NETWORK = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
STATE = with_loss_scale(optax.sgd(1.0)).init(PARAMS)
JMP = jmp.DynamicLossScale(X[0, 0])
HALF_STATE = with_half_storage(optax.sgd(1.0)).init(PARAMS.astype(jnp.bfloat16))


# An optimizer whose sum becomes an array in the first update.
SUM = optimizer({"sum": jnp.zeros(())}, lambda g, state: (g, {"sum": state["sum"] + g}))
GROWING = with_loss_scale(SUM)

# Arguments and wrong values of each class, all of them with words that are theirs.
ARGUMENTS = {
    DynamicLossScale: {
        "period": (0, 2.5, NAN, 2**31, "2000", None, True),
        "factor": (1, math.inf, "2", 2j),
        "backoff_factor": (0, 1, NAN, "half"),
        "min_loss_scale": (-1, math.inf, 2.0**25),
        "max_loss_scale": (0, NAN, math.inf),
        "loss_scale": (0.0, NAN, 0.5, 2.0**25, "2**15", 2j, [2.0], True),
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
    ("kind", "argument", "value"),
    [
        (kind, argument, value)
        for kind, table in ARGUMENTS.items()
        for argument, values in table.items()
        for value in values
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it_and_its_value(
    kind, argument, value
):
    others = {"hysteresis": 2} if kind is DynamicLossScale else {}
    message = rf"(?s)^{kind.__name__}: expected {argument} to be .*, got "
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        kind(**others | {argument: value})
    assert str(raised.value).endswith(repr(value))


MISTAKES = {
    # autocast
    "a flag for names": (
        lambda: autocast(loss, "bfloat16", keep_float32=True),
        r"keep_float32 to be a name or .*, got a bool True; .*keep_float32\(fun\)",
    ),
    "a layer among names": (
        lambda: autocast(loss, "bfloat16", keep_float32=["a", equinox.nn.Dropout()]),
        r"tuple of names, got a Dropout .*keep_float32\(fun\)",
    ),
    "a dtype as a context": (
        lambda: in_a_with(autocast("bfloat16")),
        r"got a str; write autocast\(loss_fn.* not a context manager",
    ),
    "autocast of a class": (
        lambda: autocast(nnx.Linear, "bfloat16"),
        r"got the class Linear; .*lambda model, x: loss\(model\(x\)\)",
    ),
    "autocast of a Linen module": (
        lambda: autocast(linen.Dense(3), "bfloat16"),
        r"got a Dense; .*of Linen lambda params, x: loss\(model.apply\(params, x\)\)",
    ),
    "a text for a flag": (
        lambda: autocast(loss, "bfloat16", recompute="False"),
        "expected recompute to be True or False, got 'False'",
    ),
    # diagnostics
    "a comparison in jit": (
        in_jit(diagnostics.compare_gradients, HALF, loss),
        "compare_gradients: expected arrays with values, got traced .*outside of jax",
    ),
    # loss scales
    "a traced configuration": (
        lambda: jax.jit(lambda p: DynamicLossScale(period=p))(3),
        "concrete",
    ),
    "a floor above the cap": (
        lambda: DynamicLossScale(0.7, min_loss_scale=0.8, max_loss_scale=0.7),
        "min_loss_scale to be at most max_loss_scale = 0.7, got 0.8",
    ),
    "a misspelt name": (lambda: get_loss_scale("dynamics"), 'known are "none"; "dyn'),
    "several S": (lambda: get_loss_scale(jnp.ones(2)), "loss_scale to be a real num"),
    "a name with a number": (lambda: get_loss_scale("f16:2"), "unknown loss scale"),
    "a low start": (lambda: get_loss_scale("dynamic:0"), "expected loss_scale to be"),
    "a configuration": (
        lambda: get_loss_scale({"fp16": {"loss_scale": 0}}),
        r"got the section \{.*; pass one value of it, or .* jmp_scale.presets",
    ),
    "gradients for their flag": (
        lambda: DynamicLossScale().adjust({"w": X}),
        r"grads_finite to be a boolean, got a dict; write adjust\(all_finite\(grads",
    ),
    # gradients
    "a number for a loss scale": (
        lambda: jmp_scale.grad(loss, 1024.0),
        r"^grad: expected .* got 1024.0; pass .*get_loss_scale\(...\) of a number",
    ),
    "the class of a loss scale": (
        lambda: jmp_scale.value_and_grad(loss, DynamicLossScale),
        "^value_and_grad: expected .*got <class .*Scale'>; pass an instance",
    ),
    "a state for its loss scale": (
        lambda: jmp_scale.grad(loss, STATE),
        "got a LossScaleState; .* the .loss_scale of",
    ),
    **{
        f"another package's loss scale for {use}": (
            run,
            "loss scale, got jmp.DynamicLossScale; write import jmp_scale as jmp in",
        )
        for use, run in {
            "grad": lambda: jmp_scale.grad(loss, JMP),
            "get_loss_scale": lambda: get_loss_scale(JMP),
            "an optimizer": lambda: with_loss_scale(optax.sgd(0.1), JMP),
        }.items()
    },
    "Flax's loss scale": (
        lambda: jmp_scale.value_and_grad(loss, DynamicScale()),
        r"got flax.DynamicScale; write jmp_scale.presets.flax\(scale=",
    ),
    "a namesake of a loss scale": (
        lambda: jmp_scale.grad(loss, type("DynamicScale", (), {})()),
        "got a DynamicScale; pass an instance such as",
    ),
    "argnums for a loss scale": (
        lambda: jmp_scale.grad(loss, (0, 1)),
        r"second argument, got \(0, 1\); argnums is the third: grad\(fun, loss_",
    ),
    "a loss for its function": (
        lambda: jmp_scale.value_and_grad(jnp.ones(()), STATE.loss_scale),
        r"expected a function, got an array .*value_and_grad\(loss_",
    ),
    "a vector for a loss": (
        gradient_of(lambda w: w * jnp.ones(2)),
        r"^grad: expected fun .*got an array of shape \(2,\); return its mean",
    ),
    "an aux without has_aux": (
        gradient_of(lambda w: (w, {})),
        "loss, got a tuple of length 2; .* pass has_aux",
    ),
    "has_aux without an aux": (
        gradient_of(lambda w: w, has_aux=True),
        r"\(loss, aux\) .* got an array of shape \(\); return",
    ),
    "all_finite of a function": (
        lambda: jmp_scale.all_finite(loss),
        "all_finite: expected arrays, got a function; pass what it returns",
    ),
    "arguments of the loss": (
        lambda: jmp_scale.value_and_grad(loss, STATE.loss_scale, PARAMS, X),
        r"^value_and_grad: expected argnums .*write value_and_grad\(fun, loss_sc",
    ),
    "an aux for its flag": (
        lambda: jmp_scale.grad(loss, STATE.loss_scale, 0, X),
        r"^grad: expected argnums and has_aux .*got arrays",
    ),
    "a transform without the value": (
        gradient_of(lambda w: w, transform=jax.grad),
        r"^grad: expected transform to return \(\(value, aux\), grads\)",
    ),
    "a tree for its flag": (
        lambda: jmp_scale.select_tree({"w": X}, True, {"w": X}),
        r"scalar as pred, got a dict; write select_tree\(pred, on_true, on_false\)",
    ),
    "no spec for a leaf": (
        lambda: jmp_scale.all_finite({"w": X}, specs={"w": None}),
        r"all_finite: expected a PartitionSpec .*PartitionSpec\(\) for one that is wh",
    ),
    "no policy": (lambda: jmp_scale.get_policy(None), r"got None; write get_policy\("),
    # optimizers
    "a loss without its name": (
        lambda: with_loss_scale(optax.adam(0.1)).update(PARAMS, STATE, PARAMS, X),
        r"update\(grads, state, params, value=loss\), got a fourth argument",
    ),
    "no gradients": (
        lambda: with_loss_scale(optax.sgd(0.1)).update(None, STATE, PARAMS),
        r"update\(grads, state, params, value=loss\), got no gradients",
    ),
    "a state that grows": (
        lambda: GROWING.update(PARAMS, GROWING.init(PARAMS), PARAMS),
        r"^with_loss_scale: .*types of its state, got inner_state\['sum'\] as .*\[2\]",
    ),
    **{
        f"{guard!r} for a guard": (
            lambda guard=guard: with_loss_scale(optax.sgd(0.1), guard=guard),
            r"guard to be a SpikeGuard, got .*write guard=jmp_scale.SpikeGuard\(",
        )
        for guard in (SpikeGuard, True, 6.0)
    },
    **{
        f"{averages!r} for averages": (
            lambda averages=averages: with_half_storage(
                optax.adam(0.1), averages=averages, key=jax.random.key(0)
            ),
            r"averages to be a tuple of names, got .*write averages=\(\"mu\", \"nu\"\)",
        )
        for averages in ("mu", True, None)
    },
    **{
        f"{name} for a key": (
            lambda key=key: with_half_storage(
                optax.adam(0.1), averages=("mu",), key=key()
            ),
            r"expected one PRNG key, got .*; write key=jax.random.key\(0\)",
        )
        for name, key in {
            "a number": lambda: 0,
            "keys": lambda: jax.random.split(jax.random.key(0)),
            "raw keys": lambda: jax.random.split(jax.random.PRNGKey(0)),
        }.items()
    },
    "parameters after their state": (
        lambda: jmp_scale.full_parameters(STATE, PARAMS),
        r"full_parameters: expected the parameters first, .*\(params, opt_state\)",
    ),
    "parameters after a half-storage state": (
        lambda: checkpoints.without_half_storage(HALF_STATE, PARAMS),
        r"without_half_storage: expected the parameters first, .*\(params, opt_state\)",
    ),
    "a path for a loader": (
        lambda: checkpoints.restore("path", STATE),
        r"restore: expected a function, got a str; write restore\(lambda template",
    ),
    "a loader after the state": (
        lambda: checkpoints.restore(STATE, lambda template: template),
        r"restore: expected a function, .*; write restore\(lambda template",
    ),
    "a model for an optimizer": (
        lambda: jmp_scale.nnx.Optimizer(optax.adam(0.1), NETWORK),
        "inner to be an optax.GradientTransformation, got a Linear; pass the optimizer",
    ),
    "a number for an optimizer's loss scale": (
        lambda: with_loss_scale(optax.sgd(0.1), 8.0),
        "with_loss_scale: expected a loss scale, got 8.0",
    ),
    "a vector for a value": (step(value=PARAMS), "value to be the scalar.* alone"),
    "a loss with an aux": (step(value=(1.0, {})), "value to be the scalar.* alone"),
    "gradients of others": (step(grads=[PARAMS]), "of the structure of the parameters"),
    "the state of another optimizer": (
        step(optax.adam(0.1).init(PARAMS)),
        r"expected update\(grads, state, params, value=loss\), got update\(.*, tuple, "
        ".*checkpoints.restore",
    ),
    "a set of axes": (
        lambda: jmp_scale.all_finite(X, {"i", "j"}),
        "all_finite: expected axis_name to be the name of a mesh axis",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_write(name):
    call, words = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_the_name_of_pytorch_leads_to_ours():
    words = r"write jmp_scale.with_loss_scale\(tx, jmp_scale.Dynamic"
    with pytest.raises(AttributeError, match=words):
        _ = jmp_scale.GradScaler
    with pytest.raises(ImportError, match=words):
        from jmp_scale import GradScaler  # noqa: F401
    assert not hasattr(jmp_scale, "GradScaler")
