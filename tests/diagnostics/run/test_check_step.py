"""`check_step` names what is wrong with a step, and says nothing of right ones."""

import concurrent.futures
import functools
import itertools
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from check_step_cases import CURED, DYNAMIC, GUARD, RIGHT, WRONG, step_of
from helpers import by_name

import jmp_scale
from jmp_scale import diagnostics
from jmp_scale._state import IS_CHECKED
from jmp_scale.diagnostics._run.step_calls import Calls
from jmp_scale.diagnostics._run.step_powers import Row
from jmp_scale.diagnostics._run.step_rules import RULES

# A captured S warns; ranks are promoted as in a user's program.
pytestmark = [
    pytest.mark.usefixtures("ranks_promote"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
check_step = diagnostics.check_step


# Only one of these is the cause.
CAUSES = {"never unscaled", "unscaled twice", "clipped while scaled"}
CAUSES |= {"unscaled by the next S"}
WRONG_STEPS = [(rule, name) for rule, steps in WRONG.items() for name in steps]
# Of each rule about S, and about what a skip leaves, the first step runs by default.
LATER = {"replicas diverge", "guard without a loss", "comes back in half precision"}
LATER |= {"captured parameters", "reported scaled", "S adjusted twice"}
FIRST = [(rule, next(iter(WRONG[rule]))) for rule in WRONG if rule not in LATER]


@pytest.mark.parametrize(("rule", "name"), by_name(FIRST, WRONG_STEPS))
def test_a_mistake_is_named_with_its_cure(rule, name):
    step, args = WRONG[rule][name]()
    found = check_step(step, *args)
    problems = {problem.rule: problem for problem in found.findings}
    assert rule in problems, str(found)
    assert problems[rule].level == RULES[rule].level
    assert RULES[rule].level == "note" or not found.ok
    if rule in CAUSES or rule == "overflow hidden":
        assert CAUSES.intersection(problems) == CAUSES & {rule}


QUICK = [
    "average, True",
    "copies, by_its_name",
    "equal_parts",
    "records",
    "now_and_then, 0",
]


@pytest.mark.parametrize("name", by_name(QUICK, RIGHT))
def test_a_right_or_cured_step_has_no_problem_above_a_note(name):
    step, args = RIGHT[name]()
    found = check_step(step, *args)
    assert found.ok, str(found)
    assert CURED.get(name, set()).isdisjoint(p.rule for p in found.findings)
    assert found.calls <= 44


AGES = [(name, count) for name in RIGHT for count in (10, 1000)]


@pytest.mark.parametrize(
    ("name", "count"), by_name([("step_of, adamw, float16", 10)], AGES)
)
def test_a_right_step_that_has_trained_has_no_problem_above_a_note(name, count):
    step, args = RIGHT[name]()
    found = check_step(step, *trained(step, args, count))
    assert found.ok, str(found)


def trained(step, args, count):
    """The arguments of a step after so many of its own."""
    calls, after = Calls(step, args, {}, ()), {}
    for _ in range(count):
        after |= calls.run("a step", {}, after).after
    return calls.arguments(after)[0]


@pytest.mark.parametrize(
    ("rule", "name"),
    by_name(
        [("never unscaled", "step_of, never_unscaled, clip, 1000.0")],
        WRONG_STEPS[:4],
    ),
)
def test_a_mistake_is_named_in_a_step_that_has_trained(rule, name):
    step, args = WRONG[rule][name]()
    found = check_step(step, *trained(step, args, 10))
    assert CAUSES.intersection(f.rule for f in found.findings) == {rule}, str(found)


def linear(w, x):
    return jnp.mean((x @ w["w"] - 1) ** 2)


WEIGHTS, ROWS = {"w": jnp.full((4, 2), 0.1, "float32")}, jnp.ones((8, 4))
SGD = jmp_scale.with_loss_scale(optax.sgd(0.1), DYNAMIC)


def sgd_step(w, state, x, twice=False, tx=SGD, loss_of=linear):
    loss, grads = jmp_scale.value_and_grad(loss_of, state.loss_scale)(w, x)
    grads = state.loss_scale.unscale(grads) if twice else grads
    updates, state = tx.update(grads, state, w, value=loss)
    return optax.apply_updates(w, updates), state, loss


SGD_STEP = jax.jit(sgd_step, static_argnames=("twice", "tx", "loss_of"))
ARGS = WEIGHTS, SGD.init(WEIGHTS), ROWS


def rules_of(step, *args):
    return [problem.rule for problem in check_step(step, *args).findings]


def test_a_step_is_compiled_twice_as_it_is_and_in_float32():
    compiled = jax.jit(sgd_step)
    assert check_step(compiled, *ARGS).calls > 12
    assert compiled._cache_size() == 2


def test_arguments_are_as_they_were_and_may_be_donated():
    step, (params, state, x) = step_of(donate=(0, 1))
    params, state = jax.tree.map(jnp.copy, (params, state))
    before = jax.tree.map(np.asarray, (params, state))
    assert check_step(step, params, state, x).ok
    same = jax.tree.map(np.array_equal, before, (params, state))
    assert all(jax.tree.leaves(same))


def test_a_summary_has_each_problem_its_cure_and_what_was_not_checked():
    step = functools.partial(SGD_STEP, twice=True)
    found = check_step(step, *ARGS)
    (problem,) = found.findings
    assert str(found) == found.summary()
    assert str(problem) in str(found)
    assert str(problem).startswith("error [unscaled twice] args[0]['w']: It falls")
    assert problem.cure in str(problem)
    unseen = found._replace(findings=(), not_checked=("a thing",))
    assert unseen.ok
    assert re.match(r"check_step: no problem found in \d+ calls of the ", str(unseen))
    assert str(unseen).endswith("step.\nnot checked: a thing.")


def test_a_bare_array_is_state_if_it_is_named():
    def loss_of(w, x):
        return linear({"w": w}, x)

    @jax.jit
    def step(w, state, x):
        loss, grads = jmp_scale.value_and_grad(loss_of, state.loss_scale)(w, x)
        _, state = SGD.update(grads, state, w, value=loss)
        return 0.99 * w - 0.1 * jnp.nan_to_num(grads), state

    args = WEIGHTS["w"], SGD.init(WEIGHTS["w"]), ROWS
    unnamed = check_step(step, *args)
    assert [p.rule for p in unnamed.findings] == ["nothing comes back"]
    assert "args[0]: arrays without names" in str(unnamed)
    named = check_step(step, *args, carried=[0])
    assert [p.rule for p in named.findings] == ["changed on a skip"]
    for position in (2, 7):
        with pytest.raises(ValueError, match=rf"come back .* got {position}"):
            check_step(step, *args, carried=[position])
    with pytest.raises(TypeError, match=r"write carried=\(0,\)"):
        check_step(step, *args, carried=0)


def test_a_tree_without_names_is_state_if_it_is_named_and_a_question_else():
    def step(x, w, state, pair):
        w, state, loss = sgd_step(w, state, x)
        return loss, [w, (pair[0] + 1, pair[1] + jnp.sum(x))], state

    args = ROWS, WEIGHTS, SGD.init(WEIGHTS), (jnp.ones(3), jnp.ones(2))
    unnamed = check_step(jax.jit(step), *args)
    assert unnamed.ok
    (question,) = unnamed.not_checked
    assert question.startswith("args[3]: arrays without names, which seem to come back")
    named = check_step(jax.jit(step), *args, carried=[3])
    assert [(f.rule, f.where) for f in named.findings] == [("NaN stays", "args[3][1]")]


@pytest.mark.slow
def test_two_processes_find_the_same_with_a_split_batch_and_split_parameters():
    script = pathlib.Path(__file__).with_name("check_step_processes.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [[sys.executable, script, str(port), str(i)] for i in range(2)]
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=240)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        printed = [each.stdout.splitlines()[-3:] for each in pool.map(run, commands)]
    lines = ["[] ()", "['unscaled twice'] ()", "['changed on a skip'] ()"]
    assert printed == [lines, lines]


@pytest.mark.parametrize(
    ("of_s", "direction", "is_flat_below"),
    [
        (lambda s: 3 + 0 * s, 0, False),
        (lambda s: 3 + s / 7, 1, False),
        (lambda s: 3 + s**2 / 7, 1, False),
        (lambda s: 3 + 1 / s, -1, False),
        (lambda s: 3 + np.minimum(1, 64 / s), -1, True),
        (lambda s: 3 + np.sqrt(s), 0, False),  # not a power of a whole number
        (lambda s: 3 + np.where(s > 1, 0.1, 0), 0, False),  # underflow
    ],
)
def test_three_s_tell_a_power(of_s, direction, is_flat_below):
    powers = [*range(-12, 13, 3)]
    entries = of_s(2.0 ** np.array(powers)[:, None]) * np.linspace(1, 2, 16)
    for is_exact in (True, False):
        row = Row(powers, entries.astype("float32").astype(float), 2.0**-23, is_exact)
        assert row.direction == direction
        assert row.is_flat_below == is_flat_below


def test_autocast_is_float32_while_a_step_is_checked():
    half = jmp_scale.autocast(linear, "float16")
    stored = {"w": WEIGHTS["w"].astype("bfloat16")}
    with IS_CHECKED(True):
        assert "f16" not in str(jax.make_jaxpr(half)(WEIGHTS, ROWS))
        assert jax.jit(half)(stored, ROWS) == linear(WEIGHTS | stored, ROWS)
    assert "f16" in str(jax.make_jaxpr(half)(WEIGHTS, ROWS))


def test_a_step_whose_object_holds_the_state_is_not_called():
    class Trainer:
        def __init__(self):
            self.w, self.state = WEIGHTS, SGD.init(WEIGHTS)

        def step(self, x):
            raise AssertionError("it would change the trainer")

        __call__ = step

    trainer = Trainer()
    for step, *args in (
        (trainer.step, ROWS),
        (jax.jit(trainer.step), ROWS),
        (trainer, ROWS),
        (lambda trainer, x: trainer.step(x), trainer, ROWS),
    ):
        found = check_step(step, *args)
        assert found.findings[0].rule == "state out of reach"
        assert found.calls == 0
        assert not found.ok


def test_keyword_arguments_are_named_as_they_are():
    def step(w, s):
        return SGD_STEP(w, s, ROWS)[0], s

    (problem,) = check_step(step, WEIGHTS, s=SGD.init(WEIGHTS)).findings
    assert problem[:3] == ("S never adjusted", "error", "s.loss_scale.loss_scale")


def step_on(tx=SGD, x=ROWS, **settings):
    """A step with its arguments; what `settings` has is a setting of `sgd_step`."""
    step = functools.partial(SGD_STEP, tx=tx, **settings)
    return step, WEIGHTS, tx.init(WEIGHTS), x


def scaled(inner, loss_scale=DYNAMIC, **settings):
    return jmp_scale.with_loss_scale(inner, loss_scale, **settings)


def test_a_guard_that_starts_to_count_anew_sees_the_loss():
    step, *args = step_on(scaled(optax.sgd(1.0), guard=GUARD))
    for _ in range(2):
        args = *step(*args)[:2], ROWS
        assert check_step(step, *args).ok


def overflows(w, x):
    """A loss whose gradients overflow in float16 from S = 2 on."""
    return jmp_scale.autocast(lambda w, x: 1e5 * linear(w, x), "float16")(w, x)


def test_a_static_s_at_which_every_step_overflows_is_named():
    tx = scaled(optax.sgd(0.1), jmp_scale.StaticLossScale(2.0**24))
    (problem,) = check_step(*step_on(tx, loss_of=overflows)).findings
    assert problem.rule == "not applied"
    assert problem.text == "The step is skipped at S = 1.67772e+07."


def test_a_step_that_is_skipped_in_any_case_says_so_and_no_more():
    found = check_step(*step_on(x=-ROWS, loss_of=lambda w, x: linear(w, jnp.log(x))))
    assert [(p.rule, p.level) for p in found.findings] == [("not applied", "warning")]
    assert found.calls == 3
    assert found.findings[0].text == "The step is skipped at S = 8."
    found = check_step(*step_on(x=jnp.nan * ROWS))
    assert [(p.rule, p.where) for p in found.findings] == [("NaN goes in", "args[2]")]


def test_calls_that_raise_are_counted_and_the_first_error_is_named():
    def step(w, state, x):
        if state.loss_scale.loss_scale != 8:
            raise StopIteration("as planned")
        return SGD_STEP(w, state, x)

    found = check_step(step, *ARGS)
    (problem,) = (p for p in found.findings if p.rule == "raised")
    assert not found.ok
    assert re.match(rf"\d+ of {found.calls} calls raised", problem.text)
    assert problem.text.endswith("S = 2^53, StopIteration: as planned.")


def test_the_error_of_the_first_call_and_errors_of_types_come_out():
    def fails_at_inf(w, state, x):
        if jnp.isinf(state.loss_scale.loss_scale):
            raise TypeError("no number")
        return SGD_STEP(w, state, x)

    with pytest.raises(ZeroDivisionError):
        check_step(lambda w: 1 / 0, WEIGHTS)
    with pytest.raises(TypeError, match="no number"):
        check_step(fails_at_inf, *ARGS)


def test_what_is_no_step_is_a_type_error_that_says_what_to_write():
    with pytest.raises(TypeError, match=r"got an array.*check_step\(train_step, "):
        check_step(linear(WEIGHTS, ROWS))


# Finite gradients, and an update that is infinite or NaN.
NOT_FINITE = {
    "1 / step": lambda: optax.sgd(lambda step: 1e-2 / step),
    "in a window": lambda: optax.MultiSteps(
        optax.adam(lambda step: step**-0.5), 3
    ).gradient_transformation(),
    "b2 is 1": lambda: optax.inject_hyperparams(
        optax.adamw, hyperparam_dtype=jnp.bfloat16
    )(learning_rate=1e-2),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_an_update_that_is_not_finite_is_found_and_left_out_by_its_cure(name):
    inner = NOT_FINITE[name]()
    assert rules_of(*step_on(scaled(inner))) == ["update not finite"]
    last = optax.apply_if_finite(optax.identity(), 5)
    step, *args = step_on(scaled(optax.chain(inner, last)))
    w, state, _ = step(*args)
    assert state.applied
    assert jmp_scale.all_finite(w)


def test_a_clip_in_a_rule_of_the_loss_is_told_as_one_of_scaled_gradients():
    clip_gradient = jax.custom_vjp(lambda x: x)
    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.06, 0.06),))

    def loss_of(w, x):
        return jnp.mean((clip_gradient(x @ w["w"]) - 1) ** 2)

    problem, *_ = check_step(*step_on(loss_of=loss_of)).findings
    assert problem.rule == "clipped while scaled"
    assert "or a custom rule inside the loss clips" in problem.text


def test_an_object_with_constants_does_not_hold_the_state():
    class Normalizer:
        def __init__(self):
            self.mean = jnp.ones(4)

        def step(self, w, state, x):
            return SGD_STEP(w, state, x - self.mean / 2)

    assert rules_of(Normalizer().step, *ARGS) == []


def test_a_linear_loss_that_is_not_returned_is_no_captured_one():
    def loss_of(w, x):
        return jnp.mean(x @ w["w"])

    step, *args = step_on(scaled(optax.adam(0.1)), loss_of=loss_of)
    assert rules_of(lambda *args: step(*args)[:2], *args) == []


def test_a_step_that_overflows_at_8_is_checked_at_a_smaller_s():
    assert rules_of(*step_on(loss_of=overflows)) == []
    assert rules_of(*step_on(loss_of=overflows, twice=True)) == ["unscaled twice"]


def test_a_step_that_reads_its_data_from_elsewhere_is_asked_for_a_batch():
    batches = (i * ROWS for i in itertools.count(1))
    rules = rules_of(lambda *args: SGD_STEP(*args, next(batches)), *ARGS[:2])
    assert rules == ["not repeatable"]


def test_gradients_of_zero_are_not_checked():
    found = rules_of(*step_on(scaled(optax.adam(0.1)), 0 * ROWS))
    assert found == ["nothing learned", "gradients of zero"]


def test_a_step_that_returns_its_arguments_or_no_state_is_not_checked():
    rules = ["S never adjusted", "nothing learned"]
    assert rules_of(lambda w, state, x: (w, state), *ARGS) == rules
    rules = ["nothing comes back", "no loss scale"]
    assert rules_of(lambda w, x: linear(w, x), WEIGHTS, ROWS) == rules


def test_each_rule_has_a_step_and_says_what_to_write():
    elsewhere = {
        "no loss scale", "state out of reach", "not applied", "nothing comes back",
        "raised", "gradients of zero", "not repeatable", "update not finite",
        "NaN goes in",
    }  # fmt: skip
    assert WRONG.keys() | elsewhere == RULES.keys()
    for rule in RULES.values():
        assert rule.text.endswith(".")
        assert rule.cure.endswith(".")


def test_a_result_that_is_scaled_is_a_warning_unless_its_name_says_so():
    def step(name, w, state, x):
        s = state.loss_scale.loss_scale
        w, state, loss = sgd_step(w, state, x)
        return w, state, {name: loss * s, "S": s}

    for name, rules in (("loss", ["reported scaled"]), ("scaled_loss", [])):
        compiled = jax.jit(step, static_argnums=0)
        found = check_step(compiled, name, WEIGHTS, SGD.init(WEIGHTS), ROWS)
        assert [p.rule for p in found.findings] == rules
