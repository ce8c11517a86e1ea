"""Leaves of a state whose dtype has too few digits for their role."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import is_inexact
from ._history import LossScaleHistory

# What optimizers call their averages of squared gradients.
_SECOND_MOMENTS = frozenset({"nu", "v"})

# Half the distance between neighboring bfloat16 numbers is at least 2^-9 of them: with
# a decay nearer to 1 than that each step's change is rounded away.
_LARGEST_DECAY = 1 - 2.0**-9

# A second moment that decays is, after so many steps without a larger gradient, no more
# than so many times the mean of their squares.
_QUIET_STEPS = 500
_STALE = 8.0


def leaf_findings(
    opt_state: Any, history: LossScaleHistory | None
) -> list[tuple[str, dict[str, Any]]]:
    """The findings on dtypes: float16 anywhere, bfloat16 in second moments."""
    pairs = jax.tree_util.tree_flatten_with_path(opt_state)[0]
    pairs = [p for p in pairs if is_inexact(p[1]) and hasattr(p[1], "dtype")]
    # bfloat16 has the range of float32, and is chosen on purpose for parameters.
    narrow = [p for p in pairs if jnp.finfo(p[1].dtype).maxexp < 128]
    findings = [("float16 parameters", _described(narrow))] if narrow else []
    moments = [p for p in pairs if not _SECOND_MOMENTS.isdisjoint(_names(p[0]))]
    coarse = [p for p in moments if p[1].dtype == jnp.bfloat16]
    evidence = _evidence(pairs, moments, history) if coarse else None
    if evidence is not None:
        findings.append(("bfloat16 moments", {**_described(coarse), **evidence}))
    return findings


def _evidence(
    pairs: list[Any], moments: list[Any], history: LossScaleHistory | None
) -> dict[str, Any] | None:
    """What is known of whether the second moments decay; None if they seem to."""
    decays = [float(x) for path, x in pairs if _names(path) >= {"hyperparams", "b2"}]
    if decays and max(decays) <= _LARGEST_DECAY:
        return None
    norms = np.zeros(0)
    if history is not None:
        arrays = history.to_dict()
        norms = arrays["grad_norm"][arrays["applied"]]
        norms = norms[np.isfinite(norms)].astype(np.float64)
    if len(norms) == 0:
        return {"evidence": ""}
    if len(norms) < _QUIET_STEPS:
        return None
    total = sum(float(jnp.sum(x.astype(jnp.float32))) for _, x in moments)
    ratio = total / max(np.mean(norms[-_QUIET_STEPS:] ** 2), np.finfo(np.float64).tiny)
    if ratio < _STALE:
        return None
    return {
        "evidence": f", and the second moments are {ratio:.3g} times the mean square "
        f"of the last {_QUIET_STEPS} gradients"
    }


def _names(path: Any) -> set[Any]:
    return {getattr(key, "name", getattr(key, "key", None)) for key in path}


def _described(leaves: list[tuple[Any, Any]]) -> dict[str, Any]:
    path, leaf = leaves[0]
    more = len(leaves) - 1
    others = f", and so {'is 1 more leaf' if more == 1 else f'are {more} more leaves'}"
    return {
        "leaf": jax.tree_util.keystr(path),
        "dtype": leaf.dtype,
        "others": others if more else "",
    }
