"""Leaves of a state that have too few digits for what they are."""

from typing import Any

import jax
import jax.numpy as jnp

from .._tree import is_inexact


def leaf_findings(opt_state: Any) -> list[tuple[str, dict[str, Any]]]:
    """The findings on dtypes: float16 anywhere."""
    pairs = jax.tree_util.tree_flatten_with_path(opt_state)[0]
    pairs = [(path, leaf) for path, leaf in pairs if is_inexact(leaf)]
    pairs = [(path, leaf) for path, leaf in pairs if hasattr(leaf, "dtype")]
    # bfloat16 has the range of float32, and is chosen on purpose for parameters.
    narrow = [pair for pair in pairs if jnp.finfo(pair[1].dtype).maxexp < 128]
    return [("float16 parameters", _described(narrow))] if narrow else []


def _described(leaves: list[tuple[Any, Any]]) -> dict[str, Any]:
    path, leaf = leaves[0]
    more = len(leaves) - 1
    others = f", and so {'is 1 more leaf' if more == 1 else f'are {more} more leaves'}"
    return {
        "leaf": jax.tree_util.keystr(path),
        "dtype": leaf.dtype,
        "others": others if more else "",
    }
