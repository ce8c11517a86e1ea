"""The half-precision arrays that a function holds, and a copy with others in place.

What lies on the way to such an array is copied: closures, partials, bound methods,
containers, nodes of pytrees. The copy is traced and forgotten; what it writes is lost.
"""

import collections
import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, TypeGuard

import jax

from .._policy import holds_half
from .._tree import is_module, is_variable
from .._types import Arrays

# The objects that one holds, and its copy of others. A leaf holds none.
_Opened = tuple[Sequence[Any], Callable[[list[Any]], Any]]


class Held:
    """A function with its half-precision arrays, and the way to each of them."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self.fun = fun
        # By `id`, which is unique because the objects are kept.
        self._opened: dict[int, tuple[Any, _Opened]] = {}
        holders: dict[int, list[Any]] = collections.defaultdict(list)
        todo = [fun]
        for x in todo:  # it grows
            if id(x) not in self._opened:
                self._opened[id(x)] = x, _opened(x)
                for part in self._opened[id(x)][1][0]:
                    holders[id(part)].append(x)
                    todo.append(part)
        self.arrays = [x for x, _ in self._opened.values() if is_half_array(x)]
        held = (x for x, _ in self._opened.values() if _is_container(x))
        self._before = [(x, _items(x)) for x in held]
        way = [*self.arrays]
        for x in way:  # it grows, too
            way += holders.pop(id(x), ())
        self._on_way = {*map(id, way)}

    def restore(self) -> None:
        """Takes back what a call wrote, so that the next one begins alike."""
        for x, items in self._before:
            if not _are_same(items, _items(x)):
                _fill(x, items)

    def copied(self, arrays: Arrays) -> Callable[..., Any]:
        """Returns a copy of the function, with these arrays in place of its own."""
        new: dict[int, Any] = dict(zip(map(id, self.arrays), arrays, strict=True))

        def copied(x: Any) -> Any:
            if id(x) not in self._on_way:
                return x
            if id(x) not in new and _is_container(x):
                # It may contain itself, so that its copy is known before its items.
                new[id(x)] = CellType() if isinstance(x, CellType) else copy.copy(x)
                _fill(new[id(x)], {k: copied(v) for k, v in _items(x).items()})
            elif id(x) not in new:
                _, (parts, copy_with) = self._opened[id(x)]
                new.setdefault(id(x), copy_with([*map(copied, parts)]))
            return new[id(x)]

        return copied(self.fun)


def is_half_array(x: Any) -> TypeGuard[jax.Array]:
    """Whether an object is an array of half precision."""
    return isinstance(x, jax.Array) and holds_half(x)


def _opened(x: Any) -> _Opened:
    if inspect.isfunction(x):
        parts = *(x.__closure__ or ()), x.__dict__
        return parts, functools.partial(_with_closure, x)
    if inspect.ismethod(x):
        return (x.__func__, x.__self__), lambda parts: MethodType(*parts)
    if isinstance(x, functools.partial):
        parts = x.func, x.args, x.keywords, x.__dict__
        return parts, functools.partial(_partial, x)
    if _is_container(x):
        return [*_items(x).values()], lambda _: x
    # Modules and variables of NNX are written to by methods of their own.
    if is_module(x) or is_variable(x) or jax.tree_util.all_leaves([x]):
        return (), lambda _: x
    slots, attributes = _slots(x), getattr(x, "__dict__", None)
    if attributes is not None and not slots and not isinstance(x, tuple):
        # Its attributes are all that it holds, whatever its children are.
        return (attributes,), functools.partial(_with_attributes, x)
    with contextlib.suppress(Exception):  # of a class that cannot be made of its parts
        children, structure = jax.tree.flatten(x, is_leaf=lambda each: each is not x)
        copied = jax.tree.unflatten(structure, children)
        if _are_same(_all_of(x), _all_of(copied)):  # it forgets nothing
            return children, functools.partial(jax.tree.unflatten, structure)
    return (), lambda _: x


def _slots(x: Any) -> dict[str, Any]:
    """Returns what an object holds in its `__slots__`."""
    members = ((k, v) for c in type(x).__mro__ for k, v in vars(c).items())
    names = [k for k, v in members if inspect.ismemberdescriptor(v)]
    return {k: getattr(x, k) for k in names if hasattr(x, k)}


def _all_of(x: Any) -> dict[Any, Any]:
    items = enumerate(x if isinstance(x, tuple) else ())
    return dict(items) | _slots(x) | getattr(x, "__dict__", {})


def _with_closure(fun: FunctionType, parts: list[Any]) -> FunctionType:
    *cells, attributes = parts
    names = fun.__name__, fun.__defaults__
    changed = FunctionType(fun.__code__, fun.__globals__, *names, tuple(cells))
    changed.__kwdefaults__, changed.__dict__ = fun.__kwdefaults__, attributes
    changed.__qualname__ = fun.__qualname__
    return changed


def _partial(x: functools.partial[Any], parts: list[Any]) -> Any:
    changed: Any = copy.copy(x)
    changed.__setstate__((*parts,))
    return changed


def _with_attributes(x: Any, parts: list[Any]) -> Any:
    changed = object.__new__(type(x))
    object.__setattr__(changed, "__dict__", *parts)
    return changed


def _is_container(x: Any) -> bool:
    """Whether a call may write to an object that holds others."""
    is_node = isinstance(x, (dict, list)) and not jax.tree_util.all_leaves([x])
    return is_node or isinstance(x, CellType)


def _items(x: Any) -> dict[Any, Any]:
    if isinstance(x, CellType):
        try:
            return {0: x.cell_contents}
        except ValueError:  # it is empty
            return {}
    return dict(x) if isinstance(x, dict) else dict(enumerate(x))


def _fill(x: Any, items: dict[Any, Any]) -> None:
    if isinstance(x, CellType) and not items:
        del x.cell_contents
    elif isinstance(x, CellType):
        x.cell_contents = items[0]
    elif isinstance(x, dict):
        x.clear()
        x.update(items)
    else:
        x[:] = items.values()


def _are_same(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    pairs = zip(before.values(), after.values(), strict=False)
    return [*before] == [*after] and all(a is b for a, b in pairs)
