"""Public names: where users import them from, not where they are defined."""

import types


def name_module(namespace: dict[str, object]) -> None:
    """Sets `__module__` of the public classes and functions in a module's namespace.

    Pickles, reprs and help pages then name `jmp_scale`, not its private modules, which
    may move.
    """
    module = namespace["__name__"]
    for name, value in namespace.items():
        is_definition = isinstance(value, (type, types.FunctionType))
        if is_definition and not name.startswith("_"):
            value.__module__ = str(module)
