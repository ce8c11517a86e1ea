"""The function that `autocast` returns: the user's, which says how it is cast."""

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


class CastFunction:
    """Runs `call` in place of `fun`, and is named, bound and pickled like `fun`.

    Args:
      call: the function that runs when this one is called.
      fun: the user's function.
      transform: `autocast`, or that of NNX.
      name: the name of `transform`, as users write it.
      settings: keyword arguments of `transform` that are not its defaults, and `dtype`.
    """

    # Slots, because `functools.wraps` copies `__dict__` to every wrapper.
    __slots__ = ("__dict__", "__weakref__", "_call", "_name", "_transform", "settings")

    def __init__(
        self,
        call: Callable[..., Any],
        fun: Callable[..., Any],
        transform: Callable[..., Any],
        name: str,
        settings: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._call, self._transform, self._name = call, transform, name
        self.settings = dict(settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        parts = [_shown(self.__dict__["__wrapped__"])]
        for name, value in self.settings.items():
            text = getattr(value, "name", None) or repr(value)  # of a dtype its name
            parts.append(text if name == "dtype" else f"{name}={text}")
        return f"{self._name}({', '.join(parts)})"

    def __reduce__(self) -> Any:
        """Pickles its name if that leads here (a decorator), else its parts."""
        name = self.__dict__.get("__qualname__", "")
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        make = functools.partial(self._transform, **self.settings)
        return make, (self.__dict__["__wrapped__"],)


def not_default(fun: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Returns the keyword arguments that differ from the defaults of `fun`."""
    defaults = fun.__kwdefaults__ or {}
    return {name: x for name, x in options.items() if x != defaults[name]}


def _shown(fun: Any) -> str:
    if isinstance(fun, functools.partial):
        return f"partial({_shown(fun.func)})"
    if isinstance(fun, CastFunction):
        return repr(fun)
    return getattr(fun, "__name__", type(fun).__name__)
