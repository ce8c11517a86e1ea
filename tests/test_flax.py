"""Without Flax the two modules that need it say what to install."""

import importlib
import sys

import pytest

import jmp_scale


@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_a_missing_flax_names_the_extra(module, monkeypatch):
    for name in ("_flax", "linen", "nnx"):
        monkeypatch.delitem(sys.modules, f"jmp_scale.{name}", raising=False)
        monkeypatch.delattr(jmp_scale, name, raising=False)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ImportError, match=r'pip install "jmp_scale\[flax\]"'):
        importlib.import_module(f"jmp_scale.{module}")
