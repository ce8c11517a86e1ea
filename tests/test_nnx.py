"""Flax NNX's Optimizer: what a skipped step keeps, and that it looks like NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    GOOD,
    GUARDED,
    LEAPS,
    OVERFLOWS,
    TX,
    assert_bitwise_equal,
    count_traces,
    data,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_scale
from jmp_scale.diagnostics import precision_report
from jmp_scale.nnx import Optimizer

STATIC = jmp_scale.with_loss_scale(optax.sgd(0.1), jmp_scale.StaticLossScale(8.0))


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


def make(tx=TX, **kwargs):
    model = Net(nnx.Rngs(0))
    return model, Optimizer(model, tx, **kwargs)


def stepper(loss_fn, with_value=True):
    def train_step(model, optimizer, x):
        loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads, value=loss if with_value else None)

    return train_step


train_step = stepper(loss_fn, with_value=False)
train_step_with_value = stepper(loss_fn)
odd_step = stepper(lambda model, x: model(x))
jitted = functools.cache(nnx.jit)


@nnx.jit
def forward(model, optimizer, x):
    return optimizer.value_and_grad(loss_fn)(model, x)


@nnx.jit
def backward(model, optimizer, loss, grads):
    optimizer.update(model, grads, value=loss)


def train_step_in_parts(model, optimizer, x):
    backward(model, optimizer, *forward(model, optimizer, x))


def run(sizes, model, optimizer, step):
    for size in sizes:
        step(model, optimizer, data(size))


def snapshot(model, optimizer):
    """Everything that training keeps, except the loss scale's own state."""
    state = nnx.to_pure_dict(nnx.state((model, optimizer)))
    optimizer_state = state.pop(1)
    inner_state = optimizer_state["opt_state"].get("inner_state")
    return state[0], inner_state, optimizer_state["step"]


def values(model):
    """All but what was sown for inspection, which stays as it was sown."""
    state = nnx.state(model, nnx.Not(nnx.Intermediate))
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(params=[pytest.param("eager", marks=pytest.mark.slow), "nnx.jit"])
def compiled(request):
    return jitted if request.param == "nnx.jit" else lambda step: step


@pytest.mark.parametrize(
    ("tx", "bad", "step"),
    [
        (TX, OVERFLOWS, train_step),
        pytest.param(TX, OVERFLOWS, train_step_with_value, marks=pytest.mark.slow),
        (GUARDED, LEAPS, train_step_with_value),
        (GUARDED, OVERFLOWS, train_step_in_parts),
    ],
)
def test_a_skipped_step_leaves_all_that_training_keeps_bit_identical(
    tx, bad, step, compiled
):
    model, optimizer = make(tx)
    run([GOOD, GOOD, GOOD], model, optimizer, jitted(step))
    before = snapshot(model, optimizer)
    s = float(optimizer.loss_scale.loss_scale)
    run([bad], model, optimizer, compiled(step))
    assert_bitwise_equal(snapshot(model, optimizer), before)
    assert int(optimizer.opt_state.skipped[...]) == 1
    # A non-finite loss that is given as `value` leaves S alone, as does a spike.
    is_given = step is not train_step
    assert float(optimizer.loss_scale.loss_scale) == (s if is_given else s / 2)


def test_steps_with_donation_are_one_compilation_also_across_skips_and_a_growth():
    model, optimizer = make(GUARDED)
    step, traces = count_traces(train_step_with_value)
    step = nnx.jit(step, donate_argnums=(0, 1))
    run([GOOD, GOOD, LEAPS, GOOD, OVERFLOWS, GOOD], model, optimizer, step)
    assert len(traces) == 1
    assert int(optimizer.opt_state.spikes[...]) == 1


def test_an_aux_is_returned_and_the_model_may_stand_second():
    model, optimizer = make(STATIC)

    def second(x, model):
        return loss_fn(model, x), x.shape

    fun = optimizer.value_and_grad(second, argnums=1, has_aux=True)
    (_, aux), grads = nnx.jit(fun)(data(OVERFLOWS), model)
    optimizer.update(model, grads)
    assert aux == (16, 4)
    assert jmp_scale.all_finite(nnx.state(model, nnx.BatchStat))


def test_only_the_variables_of_wrt_are_trained():
    model, optimizer = make(wrt=nnx.PathContains("out"))
    hidden, out = model.hidden.kernel[...], model.out.kernel[...]
    run([GOOD], model, optimizer, jitted(train_step))
    assert_bitwise_equal(model.hidden.kernel[...], hidden)
    assert (model.out.kernel[...] != out).any()


def test_a_second_loss_scale_is_refused():
    with pytest.raises(ValueError, match=r"loss_scale in one place.*already wrapped"):
        make(loss_scale=jmp_scale.DynamicLossScale())


def test_the_given_loss_scale_is_kept_in_variables_on_which_its_verbs_work():
    loss_scale = jmp_scale.DynamicLossScale(8.0, period=7)
    _, optimizer = make(tx=optax.sgd(0.1), loss_scale=loss_scale)
    assert_bitwise_equal(optimizer.loss_scale, loss_scale)
    loss_scale = optimizer.opt_state.loss_scale
    assert isinstance(loss_scale.loss_scale, nnx.Variable)
    assert float(loss_scale.scale(jnp.float32(3.0))) == 24.0
    assert float(loss_scale.unscale(jnp.float16(4.0))) == 0.5
    adjusted = loss_scale.adjust(jnp.array(False), loss_finite=jnp.array(True))
    assert float(adjusted.loss_scale) == 4.0


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
        self.unwritten = nnx.Variable({"a": jnp.ones(1), "b": None})
        self.nothing = nnx.Variable(None)
        self.count, self.total = nnx.Variable(0), nnx.Variable(0.0)
        self.pair = nnx.Variable((jnp.zeros([]), jnp.zeros(2)))
        self.key = nnx.Variable(jax.random.key(0))
        self.array = nnx.data(jnp.zeros(2))
        self.parts = nnx.List([nnx.BatchNorm(2, rngs=nnx.Rngs(0))])

    def __call__(self, x):
        y = (self.w[...] * x).astype(jnp.float16).astype(jnp.float32)
        self.table["sum"] = self.table["sum"] + y
        self.table["calls"] = [self.table["calls"][0] + 1]
        write(self.count, read(self.count) + 1)
        write(self.total, read(self.total) + y.sum())
        write(self.pair, (y.sum(), y))
        write(self.key, jax.random.split(read(self.key))[0])
        self.array = self.array + y
        self.gain[...] = self.gain * 2
        write(self.narrow, y.sum().astype(jnp.float16))
        self.sow(nnx.Intermediate, "h", y)
        return self.parts[0](y[None]).sum() + y.sum()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_variables_of_any_content_are_written_by_applied_steps_and_put_back_by_others(
    compiled,
):
    model = Odd()
    optimizer, step = Optimizer(model, optax.sgd(0.1)), compiled(odd_step)
    step(model, optimizer, jnp.ones(2))
    first = values(model)
    assert model.narrow.dtype == jnp.float16  # that which the forward pass gave it
    step(model, optimizer, jnp.full(2, OVERFLOWS))
    assert_bitwise_equal(values(model), first)
    assert jnp.isinf(model.h[-1]).all()
    step(model, optimizer, jnp.ones(2))
    assert (int(read(model.count)), int(model.table["calls"][0])) == (2, 2)
    assert float(read(model.total)) == pytest.approx(3.8, rel=1e-3)  # float16
    assert int(optimizer.step[...]) == 2


class Sown(nnx.Variable):
    pass


class Sower(nnx.Module):
    """Makes a variable at the first call, and lets it grow at the next ones."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        y = (self.w[...] * x).astype(jnp.float16).astype(jnp.float32)
        self.sow(Sown, "h", {"y": y, "rows": jnp.int32(len(y))})
        if not hasattr(self, "mean"):
            self.mean = nnx.BatchStat(jnp.zeros(2))
        self.mean[...] = 0.5 * self.mean[...] + y
        if not hasattr(self, "seen"):
            self.seen = nnx.BatchStat(jnp.zeros([0, 2]))
        write(self.seen, jnp.concatenate([read(self.seen), y[None]]))
        return y.sum()


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_the_forward_pass_makes_or_lets_grow_stays_and_is_finite_after_a_skip(
    compiled,
):
    model = Sower()
    optimizer, step = Optimizer(model, optax.sgd(0.0)), compiled(odd_step)
    for size, mean in ((OVERFLOWS, 0.0), (1.0, 1.0), (OVERFLOWS, 1.0), (2.0, 2.5)):
        step(model, optimizer, jnp.full(2, size))
        assert jmp_scale.all_finite(nnx.state(model))
        assert model.mean[...].tolist() == [mean, mean]
    assert [h["y"].tolist() for h in model.h] == [[0, 0], [1, 1], [0, 0], [2, 2]]
    assert [h["rows"].tolist() for h in model.h] == [2, 2, 2, 2]
    assert model.seen[...].tolist() == [[0, 0], [1, 1], [0, 0], [2, 2]]


def test_a_loss_that_alone_is_not_finite_puts_the_statistics_back():
    model, optimizer = make(STATIC)
    before = snapshot(model, optimizer)

    def loss_of_infinity(model, x):
        return loss_fn(model, x) + jnp.inf  # whose gradients are finite

    _, grads = nnx.jit(optimizer.value_and_grad(loss_of_infinity))(model, data(GOOD))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert_bitwise_equal(snapshot(model, optimizer), before)


class Statistics(nnx.Module):
    """A module without parameters whose forward pass keeps the last input."""

    def __init__(self):
        self.last = nnx.BatchStat(jnp.zeros([]))

    def __call__(self, x):
        self.last[...] = x
        return x


def teacher_loss(model, others, x):
    for other in jax.tree.leaves(others, is_leaf=lambda y: isinstance(y, Statistics)):
        x = other(x) if callable(other) else x
    return model["net"].w[0] * x


@pytest.mark.parametrize(
    "place", [lambda m: {"a": [m]}, lambda m: (m, 3), lambda m: [m, nnx.List([m])]]
)
def test_every_module_among_the_arguments_is_put_back(place, compiled):
    model = nnx.Dict(net=Odd())
    other = Statistics()
    optimizer = Optimizer(model, optax.sgd(0.1))

    def step(model, optimizer, other, x):
        fun = optimizer.value_and_grad(teacher_loss)
        _, grads = fun(model, place(other), x)
        optimizer.update(model, grads)

    compiled(step)(model, optimizer, other, jnp.float32(2.0))
    compiled(step)(model, optimizer, other, jnp.float32(jnp.inf))
    assert float(other.last[...]) == 2.0


def test_a_lone_variable_and_a_random_stream_among_the_arguments_are_put_back():
    def loss_fn(model, last, rngs, x):
        last[...] = x
        return model.w[0] * x + jax.random.uniform(rngs())

    model, last, rngs = Odd(), nnx.Variable(jnp.zeros([])), nnx.Rngs(0)
    optimizer = Optimizer(model, optax.sgd(0.1))
    optimizer.value_and_grad(loss_fn)(model, last, rngs, jnp.float32(jnp.nan))
    assert (float(last[...]), int(rngs.default.count[...])) == (0.0, 0)
    optimizer.value_and_grad(loss_fn)(model, last, rngs, jnp.float32(2.0))
    assert (float(last[...]), int(rngs.default.count[...])) == (2.0, 1)


def test_arguments_may_be_given_by_name():
    model, optimizer = make(STATIC)
    _, expected = nnx.jit(optimizer.value_and_grad(loss_fn))(model, data(GOOD))
    model, optimizer = make(STATIC)
    _, grads = nnx.jit(optimizer.value_and_grad(loss_fn))(x=data(GOOD), model=model)
    assert_bitwise_equal(nnx.to_pure_dict(grads), nnx.to_pure_dict(expected))


@pytest.mark.parametrize(
    ("argnums", "trained"),
    [((0, 1), (0, 1)), ([1], (1,)), (-2, 1), (nnx.DiffState(0, nnx.Param), 0)],
)
def test_argnums_may_be_several_negative_or_states(argnums, trained):
    def loss_fn(a, b, x):
        return (a(x) * b(x)).mean()

    a, b = (nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    optimizer = Optimizer(a, optax.sgd(0.1), loss_scale=jmp_scale.StaticLossScale(8.0))
    _, grads = optimizer.value_and_grad(loss_fn, argnums)(a, b, jnp.ones((3, 2)))
    states = jax.tree.map(lambda n: nnx.DiffState(n, nnx.Param), trained)
    _, expected = nnx.value_and_grad(loss_fn, argnums=states)(a, b, jnp.ones((3, 2)))
    assert_bitwise_equal(grads, expected)


TREE_MODE = pytest.mark.skipif(
    not hasattr(nnx, "set_graph_mode"), reason="this version of Flax has no tree mode"
)


@TREE_MODE
def test_tree_mode_trains_and_puts_back_too():
    def loss_fn(model, x):
        return (model.norm(x).mean(0) * model.scale).mean() + model.scale.sum()

    model = nnx.Dict(
        norm=nnx.BatchNorm(2, rngs=nnx.Rngs(0)), scale=nnx.Param(jnp.ones(2))
    )
    with nnx.set_graph_mode(False):
        optimizer = Optimizer(model, optax.sgd(0.5))
        for size in (1.0, jnp.nan):
            x = jnp.array([[1.0, 2.0], [3.0, 5.0]]) * size
            loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
            optimizer.update(model, grads, value=loss)
    assert model.scale[...].tolist() == [0.5, 0.5]
    assert jmp_scale.all_finite(nnx.state(model))
    assert int(optimizer.step[...]) == 1


@TREE_MODE
def test_in_tree_mode_a_module_that_nothing_writes_to_may_be_of_an_outer_trace():
    student, teacher = (nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    optimizer = Optimizer(student, optax.sgd(0.1))

    @jax.jit
    def distill(x):
        fun = optimizer.value_and_grad(lambda a, b, x: ((a(x) - b(x)) ** 2).mean())
        return fun(student, teacher, x)[0]

    x = jnp.ones((3, 2))
    with nnx.set_graph_mode(False):
        loss = distill(x)
    expected = ((student(x) - teacher(x)) ** 2).mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_autocast_warns_once_of_a_name_that_matches_nothing():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    fun = jmp_scale.nnx.autocast(nnx.Linear.__call__, "bf16", keep_float32=("typo",))
    with pytest.warns(UserWarning, match=r"names nothing .*'typo'"):
        fun(model, jnp.ones((3, 2)))
    fun(model, jnp.ones((3, 2)))  # where a warning is an error


def test_a_name_of_an_attribute_warns_and_lists_classes():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            return self.head(x)

    model, x = Net(nnx.Rngs(0)), jnp.ones((3, 2))
    fun = jmp_scale.nnx.autocast(Net.__call__, "bf16", keep_float32="head")
    words = r"\['head'\]; there are .*Linear.* classes of NNX modules, not their attrib"
    with pytest.warns(UserWarning, match=words):
        fun(model, x)
    named = jmp_scale.nnx.autocast(Net.__call__, "bf16", keep_float32="Linear")
    with pytest.warns(UserWarning, match="keep_float32 around them"):
        assert (named(model, x) == model(x)).all()


@pytest.mark.parametrize("mark", [jmp_scale.keep_float32, jmp_scale.in_half])
def test_a_marked_layer_is_trained_with_its_model(mark):
    class Marked(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(4, 8, rngs=rngs)
            self.head = mark(nnx.Linear(8, 1, rngs=rngs))

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


def test_of_micro_batches_added_by_hand_only_the_bad_one_is_put_back(compiled):
    model = nnx.Dict(net=Odd(), other=Statistics())
    optimizer = Optimizer(model, optax.sgd(0.1))

    def step(model, optimizer, xs):
        fun = optimizer.value_and_grad(lambda m, x: m.net.w[0] * m.other(x))
        grads = [fun(model, x)[1] for x in xs]
        optimizer.update(model, jax.tree.map(lambda *g: sum(g), *grads))

    compiled(step)(model, optimizer, jnp.array([1.0, 2.0, jnp.nan]))
    assert float(model.other.last[...]) == 2.0
    assert int(optimizer.opt_state.skipped[...]) == 1


@pytest.mark.parametrize("place", [lambda x: x, lambda x: {"a": [x]}])
def test_gradients_before_the_model_are_refused(place):
    model = place(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    optimizer = Optimizer(model, optax.sgd(0.1))
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    with pytest.raises(TypeError, match=r"model before its gradients, got State and"):
        optimizer.update(grads, model)
    optimizer.update(model, grads)
    assert int(optimizer.step[...]) == 1


def test_arguments_by_position_are_an_error_that_names_the_keywords():
    model = Net(nnx.Rngs(0))
    for argument in (nnx.Param, jmp_scale.DynamicLossScale()):
        with pytest.raises(
            TypeError, match=r"write loss_scale=, guard= or wrt= before"
        ):
            Optimizer(model, optax.adam(1e-3), argument)


def test_the_report_differentiates_only_the_trained_variables_of_an_optimizer():
    linear = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model = nnx.LoRA(4, 2, 4, base_module=linear, rngs=nnx.Rngs(1))
    optimizer = Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)

    def loss(model, x):
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    def report(transform):
        found = precision_report(loss, model, jnp.ones((2, 4)), transform=transform)
        return [finding.message for finding in found.findings]

    assert report(optimizer.value_and_grad) == []
    (message,) = report(nnx.value_and_grad)
    assert "frozen" in message
    assert "transform=optimizer.value_and_grad" in message


@pytest.mark.parametrize(
    ("axis_name", "mean", "expected"),
    [
        ("i", lambda grads: jax.lax.pmean(grads, "i"), [False, False]),
        ("i", lambda grads: grads, [False, False]),
        ((), lambda grads: grads, [True, False]),
    ],
)
def test_replicas_that_apply_a_step_keep_its_statistics(axis_name, mean, expected):
    tx = jmp_scale.with_loss_scale(optax.sgd(0.1), axis_name=axis_name)
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    graph, state = nnx.split((model, Optimizer(model, tx)))

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        fun = optimizer.value_and_grad(lambda m, x: (m(x) ** 2).mean())
        loss, grads = fun(model, x[0])
        optimizer.update(model, mean(grads), value=loss)
        return model.mean[...].any()[None], optimizer.opt_state.applied[...][None]

    x = jnp.ones((2, 1, 4, 3)).at[1, 0, 0, 0].set(jnp.inf)  # of the second replica
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    options = {"in_specs": (P(), P("i")), "out_specs": P("i"), "check_vma": False}
    by_vmap = jax.vmap(step, in_axes=(None, 0), axis_name="i")
    for run in (by_vmap, jax.shard_map(step, mesh=mesh, **options)):
        kept, applied = jax.jit(run)(state, x)
        assert applied.ravel().tolist() == kept.ravel().tolist() == expected
