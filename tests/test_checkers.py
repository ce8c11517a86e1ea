"""The main programs of the pages run under what JAX has to check a program."""

import contextlib
import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
BEFORE = """
import jax, jax.numpy as jnp, optax, jmp_scale
loss_fn = lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2)
"""
AFTER = """
params = {"w": jnp.ones((4, 2))}
train_step(params, tx.init(params), jnp.ones((8, 4)))
"""


def program_of(page):
    """The first program of a page; the README's is the one that its diff makes."""
    text = (ROOT / page).read_text()
    if page != "README.md":
        return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
    (diff,) = re.findall(r"block: float16 -->\n```diff\n(.*?)^```$", text, re.S | re.M)
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join([BEFORE, *lines, AFTER])


RANKS = {  # what they promote themselves
    "README.md": "raise",
    "docs/flax.md": "raise",
    "docs/half-parameters.md": "allow",
    "docs/devices.md": "raise",
}


@pytest.mark.parametrize("page", RANKS)
def test_the_program_of_a_page_passes_the_checkers_of_jax(page):
    program = compile(program_of(page), page, "exec")
    with contextlib.ExitStack() as stack:
        for checker in (
            jax.checking_leaks(),
            jax.debug_key_reuse(True),
            jax.numpy_rank_promotion(RANKS[page]),
        ):
            stack.enter_context(checker)
        exec(program, {"__name__": "page"})
