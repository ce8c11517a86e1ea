"""Fails unless the package works without its extras, and names the missing package."""

import importlib
import re
import sys

import jmp_scale

assert not {"flax", "matplotlib"} & set(sys.modules), (
    "the import of jmp_scale pulled in an extra"
)
assert float(jmp_scale.DynamicLossScale(8.0).scale(1.5)) == 12.0
for module, package in {
    "linen": "flax",
    "nnx": "flax",
    "plotting": "matplotlib",
}.items():
    message = f"jmp_scale.{module} was importable, so {package} is there"
    try:
        importlib.import_module(f"jmp_scale.{module}")
    except ImportError as error:
        message = str(error)
    if not re.search(rf"pip install '?{package}\b", message):
        sys.exit(f"expected an ImportError that names {package}, got: {message}")
print(f"jmp_scale {jmp_scale.__version__} imports without its extras")
