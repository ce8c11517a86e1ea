"""Programs as a compiler makes them, and what it says of them on every run."""

import dataclasses
import time
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import jax

from compilers import hlo, targets, traffic

# Else XLA:GPU may leave out a cast to half precision and back, so that nothing is
# rounded or overflows.
AS_WRITTEN: Any = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the compiler says of one program."""

    # On the CPU as `cost_analysis` counts them, for a target as `traffic` does.
    bytes_accessed: float
    temporaries: int  # bytes
    copies: list[str]  # types of the copied buffers, such as `f32[256,256]`
    kernels: int  # instructions that compute or copy; each is a launch on a GPU
    conditionals: int
    transfers: int  # callbacks and transfers from and to the host
    collectives: list[tuple[str, tuple[str, ...]]]  # kind and operand types
    cycles: int  # those that the TPU compiler's cost model estimates, else 0
    compile_seconds: float  # of all processors

    @property
    def copied_arrays(self) -> int:
        return sum("[]" not in copied for copied in self.copies)


def options(target) -> Any:
    """Options of the compiler for a target, so that the program runs as written."""
    if target.name == "h100-cublas":
        return AS_WRITTEN | {"xla_gpu_enable_triton_gemm": False}
    return AS_WRITTEN if targets.is_gpu(target.name) else {}


def with_cudnn() -> AbstractContextManager[Any]:
    """JAX asks the GPU at hand what its cuDNN can; none is at hand here."""
    answers = {
        "check_cudnn_version": lambda: 90700,
        "check_compute_capability": lambda _: True,
        "is_cuda_compute_capability_equal": lambda _: False,
    }
    return mock.patch.multiple("jax._src.cudnn.fused_attention_stablehlo", **answers)


def compile_step(step, carry, batch, target=None):
    """The program of the carry's leaves, which are donated, and its figures.

    `step` is (carry, batch) -> (carry, loss). For a target both are sharded over its
    chips.
    """
    leaves, treedef = jax.tree.flatten(carry)

    def step_of_leaves(leaves, batch):  # jmp's loss scale cannot be lowered
        carry, loss = step(jax.tree.unflatten(treedef, leaves), batch)
        return jax.tree.leaves(carry), loss

    compiler_options = {}
    jitted = jax.jit(step_of_leaves, donate_argnums=0)
    if target is not None:
        leaves, batch = target.placed(leaves), target.placed(batch)
        # The new state lies where the old one did, as in a training loop.
        shardings = [leaf.sharding for leaf in leaves]
        out = {"out_shardings": (shardings, None)}
        jitted = jax.jit(step_of_leaves, donate_argnums=0, **out)
        compiler_options = AS_WRITTEN | options(target)
    lowered = jitted.lower(leaves, batch)
    start = time.process_time()
    compiled = lowered.compile(compiler_options=compiler_options)
    return compiled, figures(compiled, target, time.process_time() - start)


def figures(compiled, target=None, compile_seconds=0.0) -> Figures:
    """Reads what the compiler says of a program."""
    module = hlo.parse(compiled.as_text())
    here = target is None
    counted = compiled.cost_analysis()["bytes accessed"] if here else None
    return Figures(
        bytes_accessed=traffic.traffic(module) if counted is None else counted,
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        copies=list(map(str, traffic.copies(module))),
        kernels=traffic.kernels(module),
        conditionals=traffic.conditionals(module),
        transfers=traffic.host_operations(module),
        collectives=traffic.collectives(module),
        cycles=traffic.estimated_cycles(module),
        compile_seconds=compile_seconds,
    )
