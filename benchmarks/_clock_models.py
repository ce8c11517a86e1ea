"""Models that only the clock runs: in Flax NNX, with a recurrence, and in PyTorch."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from models import Model, Transformer, cast, mean_loss, wide


def nnx_transformer(sizes: Transformer) -> Model:
    """A transformer in Flax NNX, unrolled, without attention's own softmax cast."""

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
            width, more = sizes.width, {"dtype": dtype, "rngs": rngs}
            self.norm1, self.norm2 = (nnx.LayerNorm(width, **more) for _ in range(2))
            self.attention = nnx.MultiHeadAttention(
                sizes.heads, width, decode=False, **more
            )
            self.up = nnx.Linear(width, 4 * width, **more)
            self.down = nnx.Linear(4 * width, width, **more)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
            more = {"dtype": dtype, "rngs": rngs}
            self.embed = nnx.Embed(sizes.vocabulary, sizes.width, **more)
            self.blocks = nnx.List([Block(rngs, dtype) for _ in range(sizes.layers)])
            self.norm = nnx.LayerNorm(sizes.width, **more)
            self.out = nnx.Linear(sizes.width, sizes.vocabulary, **more)

        def __call__(self, ids: jax.Array) -> jax.Array:
            x, mask = self.embed(ids), nnx.make_causal_mask(ids)
            for block in self.blocks:
                x = block(x, mask)
            return self.out(self.norm(x))

    def make(dtype: Any = None) -> Any:
        return Net(nnx.Rngs(0), dtype)

    def init(key: jax.Array) -> Any:
        shape = sizes.batch, sizes.context
        ids = jax.random.randint(key, shape, 0, sizes.vocabulary)
        return nnx.state(make(), nnx.Param), ids

    def loss(params: Any, ids: jax.Array, dtype: Any, checkpointed: bool) -> jax.Array:
        del checkpointed
        net = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: make(dtype))), params)
        return mean_loss(net(ids), jnp.roll(ids, -1, axis=1))

    return Model(init, loss)


def lstm(width: int, steps: int, batch: int) -> Model:
    """An LSTM in a scan over time, whose outputs should be zero."""

    def init(key: jax.Array) -> Any:
        shapes = {"x": (width, 4 * width), "h": (width, 4 * width)}
        params = {
            name: jax.random.normal(jax.random.fold_in(key, i), shape) * width**-0.5
            for i, (name, shape) in enumerate(shapes.items())
        }
        params["bias"] = jnp.zeros(4 * width)
        return params, jax.random.normal(key, (steps, batch, width))

    def loss(params: Any, xs: jax.Array, dtype: Any, checkpointed: bool) -> jax.Array:
        del checkpointed
        params, xs = cast((params, xs), dtype)

        def turn(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            gates = x @ params["x"] + h @ params["h"] + params["bias"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros(xs.shape[1:], xs.dtype)
        _, outs = jax.lax.scan(turn, (zeros, zeros), xs)
        return jnp.mean(wide(outs) ** 2)

    return Model(init, loss)


def torch_step(
    sizes: Transformer, dtype: str | None, *, fused: bool, compiled: bool
) -> Callable[[], None]:
    """A step of AdamW in PyTorch, of the transformer that `models` has in JAX.

    float16 has PyTorch's `GradScaler`; `fused` is its own attention.
    """
    import torch
    from torch.nn import functional

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")  # TF32, as JAX does
    nn, width, heads = torch.nn, sizes.width, sizes.heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkvo = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            y, shape = self.norms[0](x), (*x.shape[:2], heads, width // heads)
            q, k, v = (f(y).view(shape).transpose(1, 2) for f in self.qkvo[:3])
            if fused:
                y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = (q @ k.mT).float() / math.sqrt(width // heads)
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=device)
                scores = scores.masked_fill(~seen.tril(), -math.inf)
                y = scores.softmax(-1).to(v.dtype) @ v
            x = x + self.qkvo[3](y.transpose(1, 2).reshape(x.shape))
            y = functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
            return x + self.down(y)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Parameter(0.02 * torch.randn(sizes.vocabulary, width))
            self.positions = nn.Parameter(0.02 * torch.randn(sizes.context, width))
            self.blocks = nn.Sequential(*(Block() for _ in range(sizes.layers)))
            self.norm = nn.LayerNorm(width)

        def forward(self, ids: Any) -> Any:
            x = self.norm(self.blocks(self.tokens[ids] + self.positions))
            logits = (x @ self.tokens.T).reshape(-1, sizes.vocabulary)
            return functional.cross_entropy(logits, ids.roll(-1, 1).reshape(-1))

    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=device == "cuda")
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    shape = sizes.batch, sizes.context
    ids = torch.randint(0, sizes.vocabulary, shape, device=device)
    kind = getattr(torch, dtype or "bfloat16")

    def loss_of(ids: Any) -> Any:
        with torch.autocast(device, kind, enabled=dtype is not None):
            return net(ids)

    run = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        scaler.scale(run(ids)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return step
