"""What the README says works, and is where a newcomer looks for it."""

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp_scale
from jmp_scale.diagnostics import precision_report

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = {
    name: (language, code)
    for name, language, code in re.findall(
        r"<!-- block: (\w+) -->\n```(\w+)\n(.*?)```", README, re.DOTALL
    )
}
LINK = re.compile(r"\]\(([^)#\s]+)\)")


def test_every_block_of_the_readme_has_a_name():
    languages = [language for language, _ in BLOCKS.values()]
    assert len(BLOCKS) == README.count("```") // 2
    assert set(languages) == {"bash", "python"}


def test_the_first_two_commands_are_two_command_lines():
    commands = [code for language, code in BLOCKS.values() if language == "bash"]
    assert [command.strip().count("\n") for command in commands] == [0, 0]
    assert "examples/train_digits.py" in commands[0]
    assert commands[1].strip().endswith("pytest")


def test_the_readme_is_one_screen_and_a_half():
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 1100


def test_the_train_step_stands_within_forty_lines():
    assert "apply_updates" in "\n".join(README.splitlines()[:40])


def test_the_first_block_prints_a_gradient_of_zero_and_the_right_one(capsys):
    exec(BLOCKS["quickstart"][1], {})
    lines = capsys.readouterr().out.splitlines()
    without, with_, w = (float(line.split()[-1]) for line in lines)
    assert without == 0
    # The CPU decides where float16 is rounded, and so the last digits.
    assert with_ == pytest.approx(-2e-5, rel=0.05)
    assert w == pytest.approx(0.3, abs=0.01)


def test_the_first_block_breaks_no_rule_of_half_precision():
    names = {}
    exec(BLOCKS["quickstart"][1], names)
    assert precision_report(names["loss_fn"], names["w"]).findings == ()


def test_the_optax_lines_of_the_readme_train_a_float16_model():
    policy = jmp_scale.get_policy("params=float32,compute=float16,output=float32")

    def loss_fn(params, batch):
        params, x = policy.cast_to_compute((params, batch["x"]))
        return jnp.mean((policy.cast_to_output(x @ params["w"]) - batch["y"]) ** 2)

    namespace = {"jax": jax, "jmp_scale": jmp_scale, "optax": optax}
    namespace |= {"loss_fn": loss_fn}
    exec(BLOCKS["optax"][1], namespace)
    x = jax.random.normal(jax.random.key(0), (64, 4))
    batch = {"x": x, "y": x @ jnp.full((4, 1), 0.1)}
    params = {"w": jnp.zeros((4, 1))}
    opt_state = namespace["tx"].init(params)
    losses = []
    for scale in (1.0, 1e6, 1.0, 1.0):  # inputs of 1e6 overflow in float16
        params, opt_state, loss = namespace["train_step"](
            params, opt_state, batch | {"x": x * scale}
        )
        losses.append(float(loss))
    assert namespace["train_step"]._cache_size() == 1
    assert losses[-1] < losses[0]
    assert opt_state.skipped == 1
    assert isinstance(opt_state.loss_scale, jmp_scale.DynamicLossScale)


def test_the_linen_lines_of_the_readme_train_a_model():
    model = nn.BatchNorm(use_running_average=False)
    x = jax.random.normal(jax.random.key(0), (8, 2))
    variables = model.init(jax.random.key(1), x)

    def loss_fn(params):
        y, updates = model.apply(
            variables | {"params": params}, x, mutable="batch_stats"
        )
        return jnp.mean((y - 1) ** 2), updates

    run = {
        "jmp_scale": jmp_scale,
        "optax": optax,
        "model": model,
        "loss_fn": loss_fn,
        **variables,
    }
    exec(BLOCKS["linen"][1], run)
    assert run["state"].step == 1
    assert (run["state"].batch_stats["mean"] != variables["batch_stats"]["mean"]).all()


def test_the_nnx_lines_of_the_readme_train_a_model():
    def loss_fn(model, batch):
        return jnp.mean((model(batch) - 1) ** 2)

    namespace = {
        "jmp_scale": jmp_scale,
        "optax": optax,
        "loss_fn": loss_fn,
        "batch": jnp.ones((4, 2)),
    }
    exec(
        BLOCKS["nnx"][1],
        namespace | {"model": nnx.Linear(2, 1, rngs=nnx.Rngs(0))},
        run := {},
    )
    assert run["optimizer"].step[...] == 1


@pytest.mark.parametrize("path", sorted(set(LINK.findall(README))))
def test_every_file_that_the_readme_links_to_exists(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", ["quickstart", "optax", "linen", "nnx"])
def test_the_code_of_the_readme_fits_a_line_of_88(name):
    assert max(map(len, BLOCKS[name][1].splitlines())) <= 88
