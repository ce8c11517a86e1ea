"""Public names: where users import them from, not where they are defined."""

import types


def name_module(namespace: dict[str, object]) -> None:
    """Lets pickles, reprs and help pages name a module in place of private ones."""
    module = namespace["__name__"]
    for name, value in namespace.items():
        is_definition = isinstance(value, (type, types.FunctionType))
        if is_definition and not name.startswith("_"):
            value.__module__ = str(module)
