"""What loss scaling and skipping cost, measured beside every peer.

The optimizer-only step takes given gradients, so that nothing hides the cost; the full train step is a
small transformer's. Carries are donated, gradients are those of a loss scaled by 2^15. Ratios are to the
step without scaling.
"""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _harness
import _models
import _steps
import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

DTYPES = {"f32": jnp.float32, "f16": jnp.float16}


class Figures(NamedTuple):
    """What the compiler says of one program: the same on every run.

    Attributes:
      bytes_accessed: bytes read and written, as `cost_analysis` counts them.
      temporaries: bytes of temporary buffers.
      copies: names of the types of copied buffers, such as `f32[256,256]`.
      kernels: instructions of the entry computation that compute or copy.
      transfers: branches on the host, callbacks and transfers: each waits for the device on a GPU.
    """

    bytes_accessed: float
    temporaries: int
    copies: list[str]
    kernels: int
    transfers: int

    @property
    def copied_arrays(self) -> int:
        return sum("[]" not in copied for copied in self.copies)


def compile_step(
    step: Callable[..., Any], carry: Any, batch: Any
) -> tuple[jax.stages.Compiled, float]:
    """The program of the carry's leaves, which are donated, and the seconds that XLA took."""
    leaves, treedef = jax.tree.flatten(carry)

    def step_of_leaves(leaves, batch):  # jmp's loss scale cannot be lowered
        carry, loss = step(jax.tree.unflatten(treedef, leaves), batch)
        return jax.tree.leaves(carry), loss

    lowered = jax.jit(step_of_leaves, donate_argnums=0).lower(leaves, batch)
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def figures(compiled: jax.stages.Compiled) -> Figures:
    """Reads what the compiler says of a program."""
    text = compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    opcodes = re.findall(
        r"^  (?:ROOT )?\S+ = (?:\([^=]*?\)|\S+) ([\w-]+)\(", entry, re.MULTILINE
    )
    free = {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
    }
    transfers = re.findall(
        r" (conditional|infeed|outfeed|send|recv)\(|xla_(?:ffi_)?python_\w*callback",
        text,
    )
    return Figures(
        bytes_accessed=compiled.cost_analysis()["bytes accessed"],
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        copies=re.findall(r" = (\w+\[[\d,]*\])\S* copy\(", text),
        kernels=sum(opcode not in free for opcode in opcodes),
        transfers=len(transfers),
    )


def compilations(
    step: Callable[..., Any], carry: Any, batch: Any, steps: int = 5
) -> int:
    """Compilations over `steps` steps, which may move nothing between host and device on their way."""
    # Their number does not depend on the passes, and fusion is what takes the time.
    jitted = jax.jit(
        step, donate_argnums=0, compiler_options={"xla_disable_hlo_passes": "fusion"}
    )
    carry = jax.tree.map(
        jnp.copy, carry
    )  # the cache counts a NumPy array apart, though nothing is compiled
    with jax.transfer_guard("disallow"):
        for _ in range(steps):
            carry, _ = jitted(carry, batch)
    return jitted._cache_size()


@jax.custom_vjp
def _given(params: Any, grads: Any) -> jax.Array:
    del params, grads
    return jnp.float32(0)


_given.defvjp(
    lambda params, grads: (jnp.float32(0), grads), lambda grads, _: (grads, None)
)


def given_gradients(dtype: Any) -> Callable[[Any, Any], jax.Array]:
    """A loss whose scaled gradients are the batch, in `dtype`, whatever the scale is."""

    def loss_fn(params, batch):
        return _given(jax.tree.map(lambda p: p.astype(dtype), params), batch)

    return loss_fn


def optimizer_only(
    dtype: Any, params: Any
) -> tuple[Callable[[Any, Any], jax.Array], Any, Any]:
    """`(loss, params, batch)` of a step that consists of the optimizer alone."""
    return (
        given_gradients(dtype),
        params,
        jax.tree.map(lambda p: jnp.full_like(p, 1e-2, dtype), params),
    )


def build(peer: str, loss_fn: Any, params: Any) -> tuple[Any, Any]:
    """`(carry, step)` of a peer with AdamW, on buffers of its own."""
    return _steps.PEERS[peer](
        loss_fn, optax.adamw(3e-4), jax.tree.map(jnp.copy, params)
    )


def compare(
    title: str, loss_fn: Any, params: Any, batch: Any, peers: Sequence[str], pairs: int
) -> _harness.Table:
    """One table: a row per peer, with the deterministic figures, and wall ratios if `pairs` > 0."""
    param_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    columns = ["step", "bytes", "temporaries", "copied arrays", "scalars", "kernels", "compilations", "waits",
               "compile s", "compile ratio"]  # fmt: skip
    table = _harness.Table(title, columns + ["time ratio (quartiles)"] * (pairs > 0))
    programs = {}
    for peer in tqdm(peers, desc=title, leave=False):
        carry, step = build(peer, loss_fn, params)
        programs[peer], seconds = compile_step(step, carry, batch)
        found = figures(programs[peer])
        if peer == "unscaled":
            base, base_seconds = found, seconds
        table.rows.append([
            peer,
            f"{found.bytes_accessed / base.bytes_accessed:.3f}",
            f"{found.temporaries / param_bytes:.3f}",
            found.copied_arrays,
            len(found.copies) - found.copied_arrays,
            found.kernels,
            compilations(step, carry, batch),
            found.transfers,
            f"{seconds:.1f}",
            f"{seconds / base_seconds:.1f}",
        ])  # fmt: skip
    table.notes.append(
        "bytes: accessed, over the unscaled step's. temporaries: over the bytes of the parameters. "
        "compilations: over five steps. waits: branches on the host, callbacks and transfers in the program."
    )
    if pairs:
        carries = {peer: build(peer, loss_fn, params)[0] for peer in peers}
        add_times(table, programs, carries, batch, pairs)
    return table


def add_times(
    table: _harness.Table,
    programs: dict[str, Any],
    carries: dict[str, Any],
    batch: Any,
    pairs: int,
) -> None:
    """Adds the time ratios to the rows; without them when an A/A control shows a busy machine."""

    def runner(peer):
        leaves = jax.tree.map(jnp.copy, jax.tree.leaves(carries[peer]))

        def run():
            nonlocal leaves
            leaves, loss = programs[peer](leaves, batch)
            return leaves, loss

        return run

    base = runner("unscaled")
    before = _harness.paired_ratio(runner("unscaled"), base, pairs, "A/A control")
    ratios = {
        row[0]: _harness.paired_ratio(runner(row[0]), base, pairs, row[0])
        for row in reversed(
            table.rows
        )  # the unscaled step, which is the first, last: a second control
    }
    quiet = _harness.is_quiet(before) and _harness.is_quiet(ratios["unscaled"])
    table.notes.append(
        f"A/A control {before} before and {ratios['unscaled']} after, {pairs} pairs."
        + " Rejected: busy machine." * (not quiet)
    )
    for row in table.rows:
        row.append(str(ratios[row[0]]) if quiet else "rejected")


def compile_times(
    name: str, leaf_counts: Sequence[int], peers: Sequence[str], repeats: int
) -> _harness.Table:
    """Median seconds of compilation against the number of leaves, of 64 x 64 entries each."""
    title = (
        f"Compile seconds (and ratio) against the number of leaves, {name} gradients"
    )
    table = _harness.Table(title, ["step", *map(str, leaf_counts)])
    rows = {peer: [peer] for peer in peers}
    for count in leaf_counts:
        params = {f"leaf{i}": jnp.ones((64, 64)) for i in range(count)}
        loss_fn, params, batch = optimizer_only(DTYPES[name], params)
        seconds: dict[str, list[float]] = {peer: [] for peer in peers}
        for peer in tqdm(
            list(peers) * repeats, desc=f"{count} leaves, {name}", leave=False
        ):
            carry, step = build(peer, loss_fn, params)
            seconds[peer].append(compile_step(step, carry, batch)[1])
        medians = {peer: statistics.median(seconds[peer]) for peer in peers}
        for peer, median in medians.items():
            rows[peer].append(f"{median:.1f} ({median / medians['unscaled']:.1f})")
    table.rows = list(rows.values())
    table.notes.append(f"Median of {repeats}, the steps in turn.")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=["optimizer", "train", "compile"],
                        choices=["optimizer", "train", "compile"], help="tables to make")  # fmt: skip
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=list(DTYPES),
        choices=list(DTYPES),
        help="of the gradients",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=list(_steps.PEERS),
        choices=list(_steps.PEERS),
        help="steps to compare",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=12,
        help="of the optimizer-only step's transformer",
    )
    parser.add_argument("--width", type=int, default=256, help="of both transformers")
    parser.add_argument(
        "--leaf-counts",
        nargs="+",
        type=int,
        default=[30, 100, 300],
        help="of the compile table",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="compilations of each step of the compile table",
    )
    parser.add_argument(
        "--no-times", action="store_true", help="leave out the time ratios"
    )
    _harness.add_pairs(parser)
    args = parser.parse_args(argv)
    _harness.round_as_written()
    pairs = 0 if args.no_times else args.pairs
    wanted = ["unscaled", *(peer for peer in args.peers if peer != "unscaled")]
    peers, missing = _steps.installed(wanted)
    loss_fn, params, batch = optimizer_only(jnp.float32, {"w": jnp.ones(1)})
    carry, step = build("unscaled", loss_fn, params)
    compile_step(step, carry, batch)  # a process's first one takes longer

    tables = []
    for name in args.dtypes:
        dtype = DTYPES[name]
        if "optimizer" in args.parts:
            sizes = _models.Transformer(
                args.layers, args.width, 4, vocabulary=8192, context=128
            )
            params = _models.transformer_params(sizes)
            leaves = jax.tree.leaves(params)
            millions = sum(leaf.size for leaf in leaves) / 1e6
            title = f"AdamW alone, {name} gradients, {millions:.1f}M parameters in {len(leaves)} leaves"
            tables.append(compare(title, *optimizer_only(dtype, params), peers, pairs))
        if "train" in args.parts:
            sizes = _models.Transformer(3, args.width, 4, vocabulary=8192, context=128)
            model = _models.transformer(sizes, batch_size=8)
            batch = jax.device_put(model.batch)
            title = f"Train step, {name} compute, transformer of {sizes.layers} layers, 8 x 128 tokens"
            loss_fn = lambda p, b, model=model, dtype=dtype: model.loss(p, b, dtype)  # noqa: E731
            tables.append(compare(title, loss_fn, model.params, batch, peers, pairs))
        if "compile" in args.parts:
            tables.append(compile_times(name, args.leaf_counts, peers, args.repeats))
    for table in tables:
        table.notes += [f"{peer}: not installed." for peer in missing]
    _harness.report(tables, args.json)


if __name__ == "__main__":
    main()
