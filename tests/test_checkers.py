"""The main programs of the pages run under what JAX has to check a program."""

import pathlib
import re

import jax
import optax
import pytest

import jmp_scale

ROOT = pathlib.Path(__file__).parents[1]


def program_of(page):
    """The programs of a page."""
    text = (ROOT / page).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M))


def promoting(fun):
    standard = jax.numpy_dtype_promotion("standard")(fun)
    return jax.numpy_rank_promotion("allow")(standard)


def relaxed(make):
    """An optimizer that itself may promote, as Adam of Optax alone does."""

    def made(*args, **kwargs):
        tx = optax.with_extra_args_support(make(*args, **kwargs))
        return optax.GradientTransformationExtraArgs(*map(promoting, tx))

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/flax.md", "docs/devices.md", "docs/half-parameters.md"],
)
def test_the_program_of_a_page_passes_the_checkers_of_jax(page, monkeypatch):
    monkeypatch.setattr(optax, "adamw", relaxed(optax.adamw))
    monkeypatch.setattr(optax, "adam", relaxed(optax.adam))
    program = compile(program_of(page), page, "exec")
    if page == "docs/half-parameters.md":  # bfloat16 weights meet float32 inputs
        half = jmp_scale.autocast
        loss = lambda fun, dtype: half(promoting(fun), dtype)  # noqa: E731
        monkeypatch.setattr(jmp_scale, "autocast", loss)
        monkeypatch.setattr(optax, "apply_updates", promoting(optax.apply_updates))
    with (
        jax.checking_leaks(),
        jax.debug_key_reuse(True),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        exec(program, {"__name__": "page"})
