"""Flax NNX's Optimizer: what a skipped step keeps, and that it looks like NNX."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import GOOD, OVERFLOWS, assert_bitwise_equal, count_traces, data, each_skip
from optimizers import SGD

import jmp_scale
from jmp_scale.diagnostics import precision_report
from jmp_scale.nnx import Optimizer

STATIC = jmp_scale.with_loss_scale(SGD, jmp_scale.StaticLossScale(8.0))

pytestmark = pytest.mark.strict_promotion
# Models whose layers have several dtypes.
MIXED = jax.numpy_dtype_promotion("standard")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.hidden(x)))).astype(jnp.float32)


def loss_fn(model, x):
    return jnp.mean((model(x) - 1.0) ** 2) * jnp.mean(x**2)


def stepper(loss_fn, with_value=True):
    def train_step(model, optimizer, x):
        loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads, value=loss if with_value else None)

    return train_step


odd_step = nnx.jit(stepper(lambda model, x: model(x)))


def snapshot(model, optimizer):
    """Everything that training keeps, except the loss scale's own state."""
    kept = model, optimizer.opt_state.inner_state, optimizer.step
    return jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(kept)))


def values(model):
    """All but what was sown for inspection, which stays as it was sown."""
    state = nnx.state(model, nnx.Not(nnx.Intermediate))
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]


@each_skip
@MIXED
def test_a_skipped_step_leaves_all_that_training_keeps_bit_identical(
    tx, bad, with_value
):
    model = Net(nnx.Rngs(0))
    optimizer = Optimizer(model, tx)
    step, traces = count_traces(stepper(loss_fn, with_value))
    step = nnx.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        step(model, optimizer, data(GOOD))
    before, s = snapshot(model, optimizer), float(optimizer.loss_scale.loss_scale)
    step(model, optimizer, data(bad))
    assert_bitwise_equal(snapshot(model, optimizer), before)
    assert int(optimizer.opt_state.skipped[...]) == 1
    expected = s if with_value else s / 2
    assert float(optimizer.loss_scale.loss_scale) == expected
    step(model, optimizer, data(GOOD))
    assert len(traces) == 1
    assert int(optimizer.step[...]) == 4


def test_an_aux_is_returned_and_the_model_may_stand_second_or_have_a_name():
    def second(x, model):
        return model(x), "aux"

    model = Statistics()
    optimizer = Optimizer(model, STATIC)
    fun = optimizer.value_and_grad(second, argnums=1, has_aux=True)
    for call in (lambda x: fun(x, model), lambda x: fun(model=model, x=x)):
        (value, aux), grads = call(jnp.float32(2.0))
        assert (float(value), aux, float(grads["w"][...])) == (2.0, "aux", 2.0)
        assert float(model.last[...]) == 2.0
        call(jnp.float32(jnp.inf))
        assert float(model.last[...]) == 2.0


def test_the_given_loss_scale_is_kept_in_variables_on_which_its_verbs_work():
    loss_scale = jmp_scale.DynamicLossScale(8.0, period=7)
    optimizer = Optimizer(Statistics(), SGD, loss_scale=loss_scale)
    assert_bitwise_equal(optimizer.loss_scale, loss_scale)
    loss_scale = optimizer.opt_state.loss_scale
    assert isinstance(loss_scale.loss_scale, nnx.Variable)
    assert loss_scale.scale(jnp.float32(3.0)) == 24
    assert loss_scale.unscale(jnp.float16(4.0)) == 0.5
    assert float(loss_scale.adjust(False).loss_scale) == 4


class Statistics(nnx.Module):
    """A module with one parameter, whose forward pass keeps the last input."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones([]))
        self.last = nnx.BatchStat(jnp.zeros([]))

    def __call__(self, x):
        self.last[...] = x
        return self.w[...] * x


# Flax 0.12.0 has no `get_value`, and later versions deprecate `value`.
HAS_VERBS = hasattr(nnx.Variable, "set_value")


def read(variable):
    return variable.get_value() if HAS_VERBS else variable.value


def write(variable, value):
    variable.set_value(value) if HAS_VERBS else setattr(variable, "value", value)


class Odd(nnx.Module):
    """Whatever a Variable may hold, written by the forward pass or not."""

    def __init__(self):
        self.w, self.gain = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))
        self.narrow = nnx.BatchStat(jnp.float32(3))
        self.table = nnx.BatchStat({"sum": jnp.zeros(2), "calls": [jnp.int32(0)]})
        self.nothing = nnx.Variable(None)
        self.count, self.total = nnx.Variable(0), nnx.Variable(0.0)
        self.key = nnx.Variable(jax.random.key(0))
        self.array = nnx.data(jnp.zeros(2))
        self.parts = nnx.List([nnx.BatchNorm(2, rngs=nnx.Rngs(0))])

    def __call__(self, x):
        y = (self.w[...] * x).astype(jnp.float16).astype(jnp.float32)
        self.table["sum"] = self.table["sum"] + y
        self.table["calls"] = [self.table["calls"][0] + 1]
        write(self.count, read(self.count) + 1)
        write(self.total, read(self.total) + y.sum())
        write(self.key, jax.random.split(read(self.key))[0])
        self.array = self.array + y
        self.gain[...] = self.gain * 2
        write(self.narrow, y.sum().astype(jnp.float16))
        self.sow(nnx.Intermediate, "h", y)
        return self.parts[0](y[None]).sum() + y.sum()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_variables_of_any_content_are_written_by_applied_steps_and_put_back_by_others():
    model = Odd()
    optimizer = Optimizer(model, SGD)
    odd_step(model, optimizer, jnp.ones(2))
    first = values(model)
    assert model.narrow.dtype == jnp.float16  # that which the forward pass gave it
    odd_step(model, optimizer, jnp.full(2, OVERFLOWS))
    assert_bitwise_equal(values(model), first)
    assert jnp.isinf(model.h[-1]).all()
    odd_step(model, optimizer, jnp.ones(2))
    assert (int(read(model.count)), int(model.table["calls"][0])) == (2, 2)
    assert float(read(model.total)) == pytest.approx(3.8, rel=1e-3)  # float16
    assert int(optimizer.step[...]) == 2


class Sower(nnx.Module):
    """Makes a variable at the first call, and lets it grow at the next ones."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        y = (self.w[...] * x).astype(jnp.float16).astype(jnp.float32)
        self.sow(nnx.Cache, "h", {"y": y, "rows": jnp.int32(len(y))})
        if not hasattr(self, "mean"):
            self.mean = nnx.BatchStat(jnp.zeros(2))
        self.mean[...] = 0.5 * self.mean[...] + y
        return y.sum()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_the_forward_pass_makes_or_lets_grow_stays_and_is_finite_after_a_skip():
    model = Sower()
    optimizer = Optimizer(model, optax.sgd(0.0))
    for size, mean in ((OVERFLOWS, 0.0), (1.0, 1.0), (OVERFLOWS, 1.0), (2.0, 2.5)):
        odd_step(model, optimizer, jnp.full(2, size))
        assert jmp_scale.all_finite(nnx.state(model))
        assert model.mean[...].tolist() == [mean, mean]
    assert [h["y"].tolist() for h in model.h] == [[0, 0], [1, 1], [0, 0], [2, 2]]
    assert [h["rows"].tolist() for h in model.h] == [2, 2, 2, 2]


def test_modules_a_variable_and_a_random_stream_among_the_arguments_are_put_back():
    def loss_fn(model, others, last, rngs, x, offset):
        last[...] = x
        for other in (others[0]["a"], *others[2]):
            other(x)
        return model(x) + jax.random.uniform(rngs()) + offset

    @nnx.jit
    def gradients(optimizer, *args):
        return optimizer.value_and_grad(loss_fn)(*args)[1]

    models = [Statistics() for _ in range(3)]
    others = {"a": models[1]}, 3, nnx.List([models[2]])
    last, rngs = nnx.Variable(jnp.zeros([])), nnx.Rngs(0)
    optimizer = Optimizer(models[0], SGD)
    # The second has finite gradients.
    for x, offset in ((jnp.nan, 0.0), (2.0, jnp.inf), (2.0, 0.0)):
        given = jnp.float32(x), jnp.float32(offset)
        grads = gradients(optimizer, models[0], others, last, rngs, *given)
        kept, count = (2.0, 1) if x == 2.0 and offset == 0.0 else (0.0, 0)
        written = [float(v[...]) for v in (last, *(m.last for m in models))]
        assert (written, int(rngs.default.count[...])) == ([kept] * 4, count)
        assert jmp_scale.all_finite(grads) == (x == 2.0)


@pytest.mark.parametrize(
    ("argnums", "trained"),
    [([1], (1,)), (-3, 0), (nnx.DiffState(0, nnx.Param), 0)],
)
def test_argnums_may_be_several_negative_or_states(argnums, trained):
    def loss_fn(a, b, x):
        return a(x) * b(x)

    a, b = Statistics(), Statistics()
    states = jax.tree.map(lambda n: nnx.DiffState(n, nnx.Param), trained)
    _, expected = nnx.value_and_grad(loss_fn, argnums=states)(a, b, jnp.float32(3.0))
    optimizer = Optimizer(a, STATIC)
    _, grads = optimizer.value_and_grad(loss_fn, argnums)(a, b, jnp.float32(3.0))
    assert_bitwise_equal(grads, expected)


def test_autocast_leaves_an_object_that_is_only_read_as_it_is():
    """Flax writes no variables of an outer trace, not even unchanged ones."""
    model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((3, 2))
    structure, params = nnx.split(model)

    def loss(params, rngs):
        assert rngs is not None
        return jnp.mean(nnx.merge(structure, params)(x) ** 2)

    def gradients(fun):
        return jax.jit(lambda p, r: jax.grad(fun)(p, r))(params, nnx.Rngs(1))

    got = gradients(jmp_scale.nnx.autocast(loss, "bfloat16"))
    for a, b in zip(*map(jax.tree.leaves, (got, gradients(loss))), strict=True):
        assert jnp.allclose(a, b, rtol=0.02)


def test_autocast_loses_no_array_that_is_set_as_an_attribute():
    def fun(model, x):
        model.seen = 2 * x
        return model(x)

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    try:
        jmp_scale.nnx.autocast(fun, "bfloat16")(model, jnp.ones((3, 2)))
        seen = model.seen.tolist()  # an older Flax returns it
    except ValueError as error:
        seen = str(error)
    refused = "expected arrays in variables, but the function sets 'seen'"
    assert seen == [[2, 2]] * 3 or refused in seen


@MIXED
def test_marked_layers_are_trained_with_their_model():
    class Marked(nnx.Module):
        def __init__(self, rngs):
            self.hidden = jmp_scale.in_half(nnx.Linear(4, 8, rngs=rngs))
            self.head = jmp_scale.keep_float32(nnx.Linear(8, 1, rngs=rngs))

        def __call__(self, x):
            return self.head(self.hidden(x))

    model = Marked(nnx.Rngs(0))
    optimizer = Optimizer(model, STATIC)
    half = jmp_scale.nnx.autocast(loss_fn, "bfloat16")
    before = jax.tree.map(jnp.copy, nnx.state(model))
    nnx.jit(stepper(half))(model, optimizer, data(GOOD))
    after = nnx.state(model)
    assert after["head"]["fun"].keys() == {"kernel", "bias"}
    same = jax.tree.map(lambda x, y: bool((x == y).all()), before, after)
    assert not any(jax.tree.leaves(same))
    assert model.head.kernel is model.head.fun.kernel


@MIXED
def test_the_report_differentiates_only_the_trained_variables_of_an_optimizer():
    linear = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model = nnx.LoRA(4, 2, 4, base_module=linear, rngs=nnx.Rngs(1))
    optimizer = Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)

    def loss(model, x):
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    def report(transform):
        found = precision_report(loss, model, jnp.ones((2, 4)), transform=transform)
        return [finding.cure for finding in found.findings]

    assert report(optimizer.value_and_grad) == []
    (cure,) = report(nnx.value_and_grad)
    assert "frozen" in cure
    assert "transform=optimizer.value_and_grad" in cure


def test_replicas_that_apply_a_step_keep_its_statistics():
    tx = jmp_scale.with_loss_scale(SGD, axis_name=())
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    graph, state = nnx.split((model, Optimizer(model, tx)))

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        fun = optimizer.value_and_grad(lambda m, x: (m(x) ** 2).mean())
        loss, grads = fun(model, x[0])
        optimizer.update(model, grads, value=loss)
        return model.mean[...].any()[None], optimizer.opt_state.applied[...][None]

    x = jnp.ones((2, 1, 4, 3)).at[1, 0, 0, 0].set(jnp.inf)  # of the second replica
    kept, applied = jax.jit(jax.vmap(step, (None, 0), axis_name="i"))(state, x)
    assert applied.ravel().tolist() == kept.ravel().tolist() == [True, False]
