"""Programs with planted faults, each at the line that a comment `# !rule` marks.

Every function takes a vector, float32 unless its argument is annotated or its table has
another name, and returns an array; `# !rule:severity` gives a severity other than the
rule's usual one. What is not marked must not be reported.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
LEAST = float(jnp.finfo(F32).min)
ROWS = np.ones((8192, 2), np.float16)
TABLE, LOGS = jnp.ones((512, 4)), jnp.ones((64, 512))


column = lambda h: h.astype(int)[:, None]  # noqa: E731
rows = functools.partial(jnp.take, TABLE, axis=0)
two_rows = functools.partial(lax.dynamic_slice_in_dim, TABLE, slice_size=2)


# Faults of one line, by the dtype of the vector that they take.
OF_FLOAT16 = {
    "sum_in_float16": lambda h: jnp.sum(jnp.tile(h, 100)),  # !half-sum
    "sum_of_many_in_float16": lambda h: jnp.tile(h, 2000).sum(),  # !half-sum:error
    "cumulative_sum": lambda h: jnp.cumsum(jnp.tile(h, 100))[-1],  # !half-sum
    "tree": lambda h: lax.associative_scan(lax.add, jnp.tile(h, 99)),  # !half-sum
    "square": lambda h: h**2,  # !half-square
    "square_by_product": lambda h: h * h,  # !half-square
    "power_of_65": lambda h: jnp.clip(h, 1, 6e4) ** 65,  # !half-square
    "variance": lambda h: h.var(),  # !half-square
    "exponential": lambda h: jnp.exp(h),  # !half-exp
    "power": lambda h: jnp.abs(h) ** 0.7,  # !half-exp
    "logsumexp": lambda h: jax.nn.logsumexp(h),  # !half-exp
    "softmax": lambda h: jax.nn.softmax(h),  # !half-exp
    "logarithm": lambda h: jnp.log(jnp.abs(h) + 1),  # !half-exp
    "mask_constant": lambda h: jnp.where(h > 0, h, -1e9),  # !half-constant
    "mask_times_constant": lambda h: h + (h > 0).astype(F16) * -1e9,  # !half-constant
    "mask_by_scalar_type": lambda h: jnp.where(h > 0, h, F16(-1e9)),  # !half-constant
    "least_float32": lambda h: jnp.where(h > 0, h, LEAST),  # !half-constant
    "lost_clip": lambda h: jnp.clip(h, 1e-8, 1.0),  # !half-constant
    "large_factor": lambda h: h * 1e5,  # !half-constant
    "epsilon_in_a_division": lambda h: h / (jnp.sum(h) + 1e-8),  # !half-division
    "epsilon_in_a_power": lambda h: (jnp.abs(h) + 1e-8) ** -1,  # !half-division
    "epsilon_in_rsqrt": lambda h: lax.rsqrt(jnp.abs(h) + 1e-8),  # !half-division
    "epsilon_in_a_root_alone": lambda h: jnp.sqrt(jnp.abs(h) + 1e-12),  # !half-division
    "floor_under_a_root": lambda h: jnp.sqrt(jnp.maximum(h, 1e-8)),  # !half-division
    "epsilon_in_a_log": lambda h: jnp.log((h + 1e-20).astype(F32)),  # !half-division
    "wide_division": lambda h: 1 / (abs(h) + 1e-8).astype(F32),  # !half-division
    "epsilon_of_numpy": lambda h: h / (abs(h) + np.float16(1e-8)),  # !half-division
    "epsilon_in_maximum": lambda h: h / jnp.maximum(jnp.abs(h), 1e-8),  # !half-division
}
OF_BFLOAT16 = {
    "integers_beside_half": lambda h: h[0] * jnp.arange(3000),  # !half-integers
    "sum_of_many_in_bfloat16": lambda h: jnp.tile(h, 2000).sum(),  # !half-sum
    "logarithm_of_one_plus": lambda h: jnp.log1p(jnp.abs(h)),  # !half-exp
    "rows": lambda h: rows(h.astype(int)),  # !half-integers
    "rows_at_floors": lambda h: rows(jnp.floor(h).astype(int)),  # !half-integers
    "rows_of_float32": lambda h: rows(h.astype(F32).astype(int)),  # !half-integers
    "rows_to_add": lambda h: jnp.ones(512).at[h.astype(int)].add(1),  # !half-integers
    "labels": lambda h: jnp.take_along_axis(LOGS, column(h), 1),  # !half-integers
    "labels_of_rows": lambda h: LOGS[jnp.arange(64), h.astype(int)],  # !half-integers
    "one_hot": lambda h: jax.nn.one_hot(h.astype(int), 512),  # !half-integers
    "slice": lambda h: two_rows(h[0].astype(int)),  # !half-integers
    "least_in_bfloat16": lambda h: jnp.where(h > 0, h, LEAST),  # !half-constant
}
OF_FLOAT32 = {
    "integers": lambda x: jnp.sin(jnp.arange(5000).astype(F16)),  # !half-integers
    "half_integers": lambda x: jnp.sin(jnp.arange(5000, dtype=F16)),  # !half-integers
    "positions": lambda x: jnp.arange(5000.0)[:, None].astype(F16),  # !half-integers
    "samples": lambda x: (x * 100).astype(jnp.int16).astype(F16),  # !half-integers
    "cast_sum": lambda x: jnp.sin(jnp.sum(jnp.tile(x, 100)).astype(F16)),  # !half-sum
    "cast_cumsum": lambda x: jnp.cumsum(jnp.tile(x, 100)).astype(F16)[-1],  # !half-sum
    "cast_mask": lambda x: jnp.where(x > 0, 0.0, -1e9).astype(F16),  # !half-constant
    "gradient_of_a_bias": lambda x: ROWS + x[:2].astype(F16),  # !half-sum
    "gradient_of_a_factor": lambda x: ROWS * x[:2].astype(F16),  # !half-sum
    "cast_epsilon": lambda x: F16(1) / (abs(x) + 1e-8).astype(F16),  # !half-division
}
# Of the carry of a scan over a float16 vector.
STEPS = {
    "running_sum": lambda total, row: total + row,  # !half-carry
    "moving_average": lambda average, row: 0.99 * average + 0.01 * row,  # !half-carry
    "pulled_average": lambda average, row: average + (row - average) / 9,  # !half-carry
    "masked_sum": lambda sums, row: jnp.where(row > 0, sums + row, sums),  # !half-carry
    "sum_at_a_place": lambda sums, row: sums[None].at[0].add(row)[0],  # !half-carry
    "sum_in_a_branch": lambda total, row: lax.cond(
        row > 0,
        lambda total: total + row,  # !half-carry
        lambda total: total,
        total,
    ),
}


def reversed_sum(x):
    return lax.cumsum(jnp.tile(x, 99), reverse=True).astype(F16)[0]  # !half-sum


def segment_sum(x: F16):
    return jax.ops.segment_sum(jnp.tile(x, 200), jnp.zeros(12800, int), 2)  # !half-sum


def mask_by_full(h: F16):
    floor = jnp.full(h.shape, -1e9, F16)  # !half-constant
    return jnp.where(h > 0, h, floor)


def mask_of_numpy(x: F16):
    mask = np.where(np.tril(np.ones((300, 300))), 0, -1e9)
    bias = jnp.asarray(mask[:64, :64], F16)  # !half-constant
    return x + bias


def mask_cast_by_numpy(x: F16):
    mask = np.where(np.tril(np.ones((64, 64))), 0, -1e9)
    bias = mask.astype(np.float16)  # !half-constant
    return x + bias


def constant_between_others(x):
    table = np.array([-5, 1e-9, 1, 5], np.float32)
    return x[:4].astype(F16) * jnp.asarray(table).astype(F16)  # !half-constant


def epsilon_before_the_divisor(h: F16):
    h = h / sum([jnp.max(h)])  # starts at 0, which is no epsilon
    return h / (1e-8 + jnp.max(jnp.abs(h)))  # !half-division


def epsilon_in_a_root_below(h: F16):
    root = jnp.sqrt(jnp.mean(jnp.abs(h)) + 1e-8)  # !half-division
    return h / root


def running_sum_in_while(x):
    h = lax.stop_gradient(x).astype(F16)

    def body(state):
        i, total = state
        return i + 1, total + h[i]  # !half-carry

    return lax.while_loop(lambda s: s[0] < 64, body, (0, F16(0)))[1]


def dtype_of(function):
    (argument,) = inspect.signature(function).parameters.values()
    return F32 if argument.annotation is argument.empty else argument.annotation


# (function, dtype of its argument) by name.
FAULTS = {
    name: (function, dtype_of(function))
    for name, function in list(globals().items())
    if getattr(function, "__module__", "") == __name__
    and name not in ("column", "dtype_of")
}


def scan_of(step):
    @functools.wraps(step)
    def scan(x):
        return lax.scan(lambda carry, row: (step(carry, row), None), F16(0), x)[0]

    return scan


OF_FLOAT16 |= {name: scan_of(step) for name, step in STEPS.items()}
for table, dtype in ((OF_FLOAT16, F16), (OF_BFLOAT16, BF16), (OF_FLOAT32, F32)):
    FAULTS |= {name: (function, dtype) for name, function in table.items()}
