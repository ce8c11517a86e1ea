"""What a function holds: it is called as the object that it is, and keeps what it has.

Each program runs with float32 weights and with half-precision ones, when a copy of what
lies on the way to one is traced, too.
"""

import collections
import dataclasses
import functools
import operator
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_checks import n32
from autocast_programs import arrays
from flax import nnx
from flax.core import FrozenDict
from jax.experimental import sparse

import jmp_scale.linen
import jmp_scale.nnx
from jmp_scale import autocast, diagnostics, in_half, keep_float32
from jmp_scale._autocast.types_first import trace

W, X = arrays((4, 4), (4, 4))
NAMES = [f"layer{i}" for i in range(11)]  # sorted, layer10 comes before layer2
DTYPES = ["float32", "bfloat16"]
TRACED = set()  # dtypes of layers
new_ref = getattr(jax, "new_ref", None) or jax.array_ref


def chain(layers, seen, x):
    """Runs layers in their order, and writes what it sees into `seen`."""
    seen[:] = [*layers]
    TRACED.update(w.dtype for w in layers.values())
    for each in layers.values():
        x = jnp.tanh(x @ each)
    return x


@jax.tree_util.register_pytree_node_class
class Node:
    """A node whose `unflatten` forgets what is no child."""

    def __init__(self, layers, seen=()):
        self.layers, self.seen, self.calls = layers, seen, 0

    def __call__(self, x):
        self.calls = 1
        return chain(self.layers, self.seen, x)

    @functools.cached_property
    def square(self):
        return self.layers @ self.layers

    def tree_flatten(self):
        return (self.layers,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    layers: Any
    seen: Any
    calls: int = 0
    __call__ = Node.__call__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True)
class Slots:
    layers: Any
    seen: list
    __call__ = lambda self, x: chain(self.layers, self.seen, x)  # noqa: E731


Tuple = collections.namedtuple("Tuple", "layers seen")


class Module(eqx.Module):
    layers: Any
    seen: list = eqx.field(static=True)
    __call__ = run = Slots.__call__


def recursive(layers, seen):
    def run(x, again=True):
        return run(x, False) if again else chain(layers, seen, x)

    return run


def nonlocal_(layers, seen):
    names = None

    def write(layers):
        nonlocal names
        names = [*layers]

    def run(x):
        write(layers)
        return chain(layers, seen, x) if names else x

    return run


def in_one_dict(layers, seen):
    held = {"layers": layers, "calls": 0}

    def run(x):
        held["calls"] = held.get("calls", 0) + 1
        seen[:] = [*held["layers"]] if held["calls"] else []
        held["itself"] = held
        return chain(held["layers"], [], x)

    return run


HOLDERS = {
    "closure": lambda held, seen: lambda x: chain(held, seen, x),
    "nested closure": lambda held, seen: (lambda f: lambda x: f(x))(
        lambda x: chain(held, seen, x)
    ),
    "recursive closure": recursive,
    "nonlocal": nonlocal_,
    "in one dict": in_one_dict,
    "partial": lambda held, seen: functools.partial(chain, held, seen),
    "keyword": lambda held, seen: functools.partial(
        lambda x, fun, held: chain(fun, held, x), fun=held, held=seen
    ),
    "partial of a partial": lambda held, seen: functools.partial(
        jax.tree_util.Partial(chain, held), seen
    ),
    "method": lambda held, seen: Node(held, seen).__call__,
    "node": Node,
    "dataclass": Fields,
    "slots": Slots,
    "tuple": lambda held, seen: functools.partial(
        lambda t, x: chain(t.layers, t.seen, x), Tuple(held, seen)
    ),
    "equinox": Module,
    "method of equinox": lambda held, seen: Module(held, seen).run,
    "vmap": lambda held, seen: jax.vmap(lambda x: chain(held, seen, x)),
    "marked": lambda held, seen: in_half(lambda x: chain(held, seen, x)),
    "ordered": lambda held, seen: Node(collections.OrderedDict(held), seen),
    "default": lambda held, seen: Node(collections.defaultdict(list, held), seen),
    "frozen": lambda held, seen: lambda x: chain(FrozenDict(held), seen, x),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_function_holds_keeps_its_order_and_what_a_call_writes(name, dtype):
    turned = {name: jnp.eye(4) + jnp.roll(W, i) / 2 for i, name in enumerate(NAMES)}
    layers, seen = {name: w.astype(dtype) for name, w in turned.items()}, []
    fun = HOLDERS[name](layers, seen)
    wanted = chain(layers, [], X)
    TRACED.clear()
    np.testing.assert_allclose(autocast(fun, "float16")(X), wanted, atol=0.05)
    assert jnp.dtype("float32") in TRACED
    assert seen == NAMES
    assert getattr(fun, "calls", 1) == 1
    assert all(each.dtype == dtype for each in layers.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_beside_a_weight_is_not_lost(dtype):
    w, kept = W.astype(dtype), object()
    layers, state, count = [w, kept], {"w": w, "old": 1}, 0

    def fun(x):
        nonlocal count
        count = 3
        layers.append("new")
        state.update(new=state.pop("old"), kept=layers[1])
        return x @ layers[0] @ state["w"]

    jax.jit(autocast(fun, "bfloat16", recompute=False))(X)
    assert layers == [w, kept, "new"]
    assert (count, state) == (3, {"w": w, "new": 1, "kept": kept})


@jax.tree_util.register_pytree_node_class
class Spread(Node):
    """A node whose children are no attributes, or other arrays than these."""

    def tree_flatten(self):
        return tuple(w.T for w in self.layers.values()), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(dict(zip("ab", children, strict=True)))


class Sized(collections.namedtuple("Sized", "layers size")):
    """A tuple that cannot be made of its parts."""

    __call__ = lambda self, x: chain(self[0], [], x)  # noqa: E731

    def __new__(cls, held):
        return super().__new__(cls, held, len(held))


MADE = {
    "partial": lambda held: functools.partial(chain, held, []),
    "function": lambda held: lambda x: chain(held, [], x),
    "node": lambda held: Node(held, []),
    "other children": lambda held: Spread(held, []),
    "made otherwise": lambda held: Sized(held),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MADE)
def test_what_a_function_holds_keeps_what_was_set_later(name, dtype):
    one = MADE[name]({"b": W.astype(dtype), "a": 2 * W.T.astype(dtype)})
    one.scale, one.count = 3.0, 0

    def fun(x):
        one.count += 1
        return one(x) * getattr(one, "scale", 1.0)

    np.testing.assert_allclose(autocast(fun, "float16")(X), fun(X), atol=0.05)
    assert one.count == 2


def test_a_layer_is_known_by_what_it_is():
    layers = [Node({"w": w.astype("bfloat16")}, []) for w in (W, W.T)]
    ids, known, seen = {id(layers[1])}, weakref.WeakSet(layers[1:]), []

    def fun(x):
        seen.append([layers[0], layers[0].layers["w"]])
        for each in layers:
            x = each(x) + (id(each) in ids) + 2 * (each in known)
        return x

    np.testing.assert_allclose(jax.jit(autocast(fun, "f16"))(X), fun(X), atol=0.05)
    assert seen == 2 * [[layers[0], layers[0].layers["w"]]]


def in_a_cache(w):
    known = {}

    def fun(x, w=None):
        given = x if w is None else w
        known.setdefault("product", given @ given)
        return known["product"]

    return fun if w is None else lambda x: fun(x, w)


def changed(w):
    held = {"w": w}

    def fun(x):
        held["w"] = held["w"] * 2
        return x @ held["w"]

    return fun


WRITING = {
    "property": lambda w: functools.partial(lambda node, x: x @ node.square, Node(w)),
    "cache": in_a_cache,
    "cache of an argument": lambda _: in_a_cache(None),
    "dict": changed,
}


@pytest.mark.parametrize("name", WRITING)
def test_no_trace_sees_what_another_wrote(name):
    w = W.astype("bfloat16")
    x = w if name == "cache of an argument" else X
    wanted = jax.jit(WRITING[name](w))(x)
    found = jax.jit(autocast(WRITING[name](w), "bfloat16"))(x)
    np.testing.assert_allclose(n32(found), n32(wanted), rtol=0.02, atol=0.02)


def test_a_function_without_half_precision_is_that_object():
    class Itself:
        def __call__(self, x):
            assert self is itself
            return x @ W

    itself = Itself()
    jax.tree_util.register_pytree_node(Itself, lambda _: ((), None), lambda *_: None)
    for fun in (
        itself,
        itself.__call__,
        functools.partial(itself),
        lambda x: itself(x),
    ):
        assert autocast(fun, "bfloat16")(X).shape == (4, 4)


SCALE, SQUARE = jnp.asarray(2.0, "bfloat16"), jnp.full((4, 4), 2.0, "bfloat16")


def with_rule(reads):
    """A function with a rule of its own, parts of which read what `fun` holds."""

    def made(scale):
        def fun(w):
            one = lambda part: scale if part in reads else 2.0  # noqa: E731
            run = jax.custom_vjp(lambda y: jnp.sin(y) * one("primal"))
            rules = (
                lambda y: (run(y), y * one("forward")),
                lambda y, g: (g * jnp.cos(y / 2) * one("backward"),),
            )
            run.defvjp(*rules)
            return jnp.sum(run(X @ w))

        return fun

    return made


def with_jvp(scale):
    def fun(w):
        run = jax.custom_jvp(lambda y: jnp.sin(y))
        run.defjvp(lambda y, t: (run(*y), t[0] * jnp.cos(y[0]) * scale))
        return jnp.sum(run(X @ w)) * scale

    return fun


def with_argument(scale):
    run = jax.custom_vjp(lambda y, s: y * s, nondiff_argnums=(1,))
    run.defvjp(lambda y, s: (y * s, None), lambda s, _, g: (g * s,))
    return lambda w: jnp.sum(run(X @ w, scale))


CONCRETE = {
    "float": lambda s: lambda w: jnp.sum(X @ w) * float(s),
    "int": lambda s: lambda w: jnp.sum((X @ w)[int(s)]),
    "item": lambda s: lambda w: jnp.sum(X @ w) * s.item(),
    "numpy": lambda s: lambda w: jnp.sum(X @ w) * np.asarray(s, float),
    "nondiff_argnums": with_argument,
    "custom_jvp": with_jvp,
    **{f"custom_vjp, {part}": with_rule(part) for part in ("primal", "forward")},
    "custom_vjp, backward": with_rule("backward"),
}
AROUND = {
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
}


@pytest.mark.parametrize("name", CONCRETE)
def test_an_array_that_a_function_holds_may_be_a_number(name):
    fun = CONCRETE[name](SCALE)
    for wrap in AROUND.values():
        got = wrap(autocast(fun, "bfloat16"))(W)
        np.testing.assert_allclose(got, jax.grad(fun)(W), rtol=0.05, atol=0.02)


BY_DTYPE = {
    "sign bit": lambda w: jnp.sum(w.view(jnp.uint16) >> 15),
    "itemsize": lambda w: {"w": w * w.itemsize, "size": w.dtype.itemsize},
    "a row": lambda w: jnp.roll(w, w.itemsize // 2, 0)[w.itemsize - 1],
    "a power": lambda w: w**w.itemsize,
    "rows": lambda w: jnp.ones(w.itemsize) * w[0, 0],
    "another result": lambda w: (w, w) if w.dtype == SCALE.dtype else w,
    "another tree": lambda w: {w.dtype.name: w},
    "an array": lambda w: w * np.full((4, 4), w.itemsize),
    "neighbors": lambda w: jnp.nextafter(w, jnp.ones_like(w)),
    "an order": lambda w: jnp.subtract(*(w, w.T)[:: 3 - w.itemsize]),
    "an order of results": lambda w: (jnp.sin(w), -w)[:: 3 - w.itemsize],
    "an order of branches": lambda w: jax.lax.cond(
        w[0, 0] > 9, *(jnp.sin, jnp.cos)[:: 3 - w.itemsize], w
    ),
    "whole": lambda w: w.astype("int32" if w.itemsize == 2 else w.dtype) + 8 * w,
    "a scale": lambda w: w * (2.0**16 if w.itemsize == 2 else 1.0),
    "a large scale": lambda w: w * (1.0 if w.itemsize == 4 else 2.0**-110),
    "a near number": lambda w: w * (1.008 if w.itemsize == 2 else 1.0),
    "a large number": lambda w: n32(w) / 99 * (2e38 if w.itemsize == 2 else 2.01e38),
    "none": lambda w: w * float(w.itemsize == 4),
    "a mode": lambda w: w.at[jnp.asarray([9])].get(
        mode="clip" if w.itemsize == 2 else "fill"
    ),
    "a precision": lambda w: jnp.dot(
        n32(w), n32(w) / 3, precision="highest" if w.itemsize == 2 else None
    ),
    "a callback": lambda w: jax.pure_callback(
        functools.partial(np.multiply, w.itemsize), w, w
    ),
    "a cast": lambda w: (
        w + n32(W.astype("float8_e4m3fn" if w.itemsize == 2 else w.dtype))
    ),
    "noise": lambda w: w + jax.random.normal(jax.random.key(0), w.shape, w.dtype),
}


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("name", BY_DTYPE)
def test_a_function_of_a_dtype_is_traced_as_given(name):
    fun, w = BY_DTYPE[name], W.astype("bfloat16")
    for half in (autocast(fun, "float16"), lambda w: autocast(lambda: fun(w), "f16")()):
        jax.tree.map(np.testing.assert_array_equal, half(w), fun(w))
        types = (jax.tree.map(jnp.result_type, tree) for tree in (half(w), fun(w)))
        assert operator.eq(*types)


def with_factor(w, x):
    """Rules for derivatives with a factor that is chosen by a dtype."""
    forward, reverse = jax.custom_jvp(jnp.sin), jax.custom_vjp(jnp.sin)
    factor = 2.0 if w.itemsize == 2 else 1.0
    forward.defjvp(lambda x, t: (forward(*x), factor * t[0]))
    reverse.defvjp(lambda x: (reverse(x), None), lambda _, g: (factor * g,))
    return jnp.sum(forward(x @ w) + reverse(x @ w))


def test_a_rule_of_a_dtype_is_that_of_the_dtype_as_given():
    w = jnp.ones((4, 4), "bfloat16")
    found, wanted = (
        jax.grad(f)(w, jnp.ones((4, 4)))
        for f in (autocast(with_factor, "f16"), with_factor)
    )
    np.testing.assert_array_equal(found, wanted)


LARGE = np.linspace(0, 1, 2**19, dtype="float32").reshape(-1, 4)
SAME_PROGRAM = {
    "limit": lambda w: jnp.where(w > 0, w, jnp.finfo(w.dtype).min / 2).max(),
    "mask": lambda w: jax.nn.softmax(jnp.where(w > 0, w, -1e9)) @ w,
    "epsilon": lambda w: w / (jnp.std(w) + jnp.finfo(w.dtype).eps) * 1e-8,
    "gelu": lambda w: jax.nn.gelu(w @ w) * 0.1,
    "attention": lambda w: jax.nn.dot_product_attention(*[w.reshape(1, 4, 2, 2)] * 3),
    "cast": lambda w: (w.astype("float32") @ w).astype(w.dtype),
    "digits": lambda w: jnp.where(n32(w) @ w > 0, jnp.clip(w, 0.1, 9.1), 0.01),
    "digits of an argument": lambda w: jax.nn.leaky_relu(n32(w) @ w, 0.3),
    "a large table": lambda w: w @ w + jnp.asarray(LARGE, w.dtype)[:4],
}


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SAME_PROGRAM)
def test_roundings_and_limits_of_a_dtype_leave_it_one_program(name, dtype):
    TRACED.clear()

    def fun(w):
        TRACED.add(w.dtype)
        return SAME_PROGRAM[name](w)

    half = autocast(fun, dtype)
    text = str(jax.make_jaxpr(half)(W.astype(dtype)))
    assert jnp.dtype("float32") in TRACED
    assert "= convert_element_type[new_dtype=float32" in text
    # The program as given may do both, too.
    assert trace(fun, (W.astype(dtype),), {}).program.in_avals[0].dtype == jnp.float32


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_reference_is_written_as_without_autocast(wrap):
    def add(ref, x):
        ref[...] = (ref[...] + x @ W).astype(ref.dtype)

    def loop(ref, x):
        jax.lax.fori_loop(0, 3, lambda _, c: add(ref, x) or c, 0)
        return jnp.sum(x @ ref[...])

    for dtype in DTYPES:
        half, plain = (new_ref(jnp.zeros((4, 4), dtype)) for _ in range(2))
        result = wrap(autocast(loop, "bfloat16"))(half, X)
        np.testing.assert_allclose(result, loop(plain, X), rtol=0.05)
        assert half[...].dtype == dtype
        np.testing.assert_allclose(n32(half[...]), n32(plain[...]), atol=0.05)


def test_sparsify_goes_within():
    def fun(m, w):
        return jnp.sum(jnp.tanh(m @ w))

    m = sparse.BCOO.fromdense(jnp.eye(4))
    with pytest.raises(TypeError, match=r"write autocast\(sparsify\(f\)\)"):
        sparse.sparsify(autocast(fun, "bfloat16"))(m, W)
    around = sparse.sparsify(autocast(fun, "bfloat16"), use_tracer=True)
    np.testing.assert_allclose(around(m, W), fun(m, W), rtol=0.01)


KEYWORDS = "fun held self args kwargs loss_scale transform run step function name call"
KEYWORDS = {word: float(i) for i, word in enumerate(f"{KEYWORDS} tree half".split())}


def loss(w, /, **keywords):
    assert {*keywords} == {*KEYWORDS}
    return jnp.sum(w @ w) * keywords["fun"] + keywords["half"]


S = jmp_scale.StaticLossScale(8.0)
STATE = jmp_scale.linen.TrainState.create(
    apply_fn=None, params=W, tx=optax.sgd(0.1), loss_scale=S
)
WRAPPERS = {
    "autocast": functools.partial(autocast(loss, "f16"), W),
    "of a closure": autocast(lambda **given: loss(W, **given), "f16"),
    "of half precision": autocast(functools.partial(loss, W.astype("f2")), "f16"),
    "keep_float32": functools.partial(keep_float32(loss), W),
    "in_half": functools.partial(autocast(in_half(loss), "f16"), W),
    "marked layer": keep_float32(jax.tree_util.Partial(loss, W)),
    "value_and_grad": functools.partial(jmp_scale.value_and_grad(loss, S), W),
    "grad": functools.partial(jmp_scale.grad(loss, S), W),
    "linen": functools.partial(STATE.value_and_grad(loss), W),
    "nnx": functools.partial(
        jmp_scale.nnx.autocast(lambda v, /, **given: loss(v[...], **given), "f16"),
        nnx.Param(W),
    ),
    "check_step": functools.partial(
        diagnostics.check_step, lambda w, /, **given: (w, loss(w, **given)), W
    ),
}


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_keyword_may_have_any_name(name):
    WRAPPERS[name](**KEYWORDS)
