"""The table of rules of `check_step`: the text and the cure of each."""

from typing import Literal, NamedTuple

Level = Literal["error", "warning", "note"]


class Rule(NamedTuple):
    """A row of the table."""

    level: Level
    text: str
    cure: str


_KEEP = (
    "Keep it on a skipped step: new = jmp_scale.select_tree(opt_state.applied, new, "
    "old); TrainState.apply_gradients(name=new) and jmp_scale.nnx.Optimizer do."
)
_TAKE = (
    "Take loss and gradients from jmp_scale.value_and_grad(loss_fn, "
    "opt_state.loss_scale)(params, batch), which scales and unscales once."
)
# The cures by the wrapper that stands around with_loss_scale.
OUTERMOST = {
    "MultiStepsState": "Accumulate inside: with_loss_scale("
    "optax.MultiSteps(tx, k).gradient_transformation(), loss_scale).",
    "ApplyIfFiniteState": "Leave out optax.apply_if_finite: with_loss_scale skips.",
    "optax.chain": "Chain inside: with_loss_scale(optax.chain(clip, tx), loss_scale).",
}
_OUTERMOST = "with_loss_scale is the outermost wrapper: with_loss_scale(wrapper(tx))."
# Rules whose cure is that of the wrapper, where there is one.
OF_WRAPPERS = (
    "not outermost",
    "state put back",
    "overflow hidden",
    "overflow stays",
    "NaN stays",
)

# By level and name, the most severe first: text and cure.
_ERRORS: dict[str, tuple[str, str]] = {
    "not returned": (
        "The state of with_loss_scale is not among the results, so it never changes.",
        "Return the state that tx.update returns, and pass it to the next step.",
    ),
    "captured parameters": (
        "Gradients are the same with other parameters: the loss reads captured ones "
        "(or is linear).",
        "Differentiate with respect to the argument: loss_fn(params, batch) reads its "
        "own params.",
    ),
    "nothing changes": (
        "An applied step changes none of its arguments.",
        "Return what optax.apply_updates and tx.update return; with NNX call "
        "optimizer.update(model, grads, value=loss).",
    ),
    "S never adjusted": (
        "An applied step does not count: S comes back as it went in, or starts over.",
        "Return the state of tx.update as it is (with NNX, call optimizer.update); by "
        "hand, loss_scale = loss_scale.adjust(jmp_scale.all_finite(grads)).",
    ),
    "never unscaled": (
        "It grows with S: gradients are never unscaled, or the loss is scaled twice.",
        f"{_TAKE} By hand, grads = opt_state.loss_scale.unscale(grads) after the "
        "gradient of the scaled loss.",
    ),
    "clipped while scaled": (
        "It falls with S from some S on: gradients are clipped while they are scaled.",
        "Unscale first: clip what jmp_scale.value_and_grad returns, or inside, "
        "with_loss_scale(optax.chain(clip, tx), loss_scale).",
    ),
    "unscaled twice": (
        "It falls with S: gradients are unscaled twice, or the loss is not scaled.",
        f"{_TAKE} No unscale follows.",
    ),
    "partly unscaled": (
        "A part of it falls with S: something unscaled was added to scaled gradients.",
        "Add it to the loss, or to gradients that jmp_scale.value_and_grad returns.",
    ),
    "unscaled by the next S": (
        "It depends on the S of the next step: gradients are unscaled after adjust.",
        "Unscale by the S that scaled, before adjust: jmp_scale.value_and_grad does.",
    ),
    "S not used": (
        "With S = inf the step is applied as usual: this S does not scale the loss.",
        f"{_TAKE} Not from jax.value_and_grad, nor by an S that the step captures.",
    ),
    "another S": (
        "This S scales or unscales the gradients of another optimizer than its own.",
        "Scale and unscale each loss by the S of its own optimizer's state.",
    ),
    "state put back": (
        "A step that overflows leaves opt_state as it was, so S never falls.",
        "Return the state of tx.update on skipped steps, too.",
    ),
    "overflow hidden": (
        "Overflowed gradients are applied: a clip, nan_to_num or zero_nans hides them.",
        "Give tx.update the gradients as jmp_scale.value_and_grad returns them.",
    ),
    "overflow stays": (
        "It is NaN or infinite after a step that overflowed, and stays so.",
        _KEEP,
    ),
    "changed on a skip": (
        "It changes on a skipped step.",
        _KEEP,
    ),
    "NaN stays": (
        "It is NaN or infinite after a step whose loss was NaN, and stays so.",
        _KEEP,
    ),
    "changed on a spike": (
        "It changes on a spike, which the guard skips; its gradients are finite.",
        "Select by opt_state.applied in place of opt_state.grads_finite.",
    ),
    "replicas diverge": (
        "Replicas that were equal differ after {when}.",
        "Average before the update, grads = jax.lax.pmean(grads, axis), and let "
        "with_loss_scale agree on the skip: axis_name=None finds all axes.",
    ),
    "value is scaled": (
        "The value= is scaled: the guard sees spikes where S grows.",
        "Pass the unscaled loss, which jmp_scale.value_and_grad returns.",
    ),
}
_WARNINGS: dict[str, tuple[str, str]] = {
    "nothing learned": (
        "The optimizer moves on, but nothing else changes in {calls} applied steps.",
        "Return params = optax.apply_updates(params, updates). This is right if the "
        "learning rate is still 0.",
    ),
    "nothing comes back": (
        "No parameters or moments come back among the results: little was checked.",
        "Return the new state in the form of the old one; carried= names bare arrays.",
    ),
    "other shapes": (
        "It comes back in other shapes, so nothing was checked.",
        "Return it as it went in: a pmap with out_axes=None, or with in_axes=0.",
    ),
    "state out of reach": (
        "{what} seems to hold the state, which cannot be copied: {effect}.",
        "Pass the state as arguments and return it, at least to this check.",
    ),
    "not applied": (
        "The step is skipped, so nothing else was checked.",
        "Pass a batch with a finite loss; diagnose_nonfinite(loss_fn, loss_scale, "
        "params, batch) finds the operation that is not finite.",
    ),
    "raised": (
        "{count} of {calls} calls raised and checked nothing, the first at {first}.",
        "Leave out the step's own checks, give it data without end, and try a smaller "
        "configuration if memory runs out.",
    ),
    "S too large": (
        "The step is skipped at S = {s}, and applied at S = {smaller}.",
        "Use DynamicLossScale, which finds the largest S, or a smaller S.",
    ),
    "gradients of zero": (
        "Gradients are 0 with these arguments: whether they are unscaled is not known.",
        "Pass the arguments of a step that learns; the loss may not depend on params.",
    ),
    "guard without a loss": (
        "The guard sees gradients and no loss, whose spikes it cannot skip.",
        "Pass the loss: tx.update(grads, opt_state, params, value=loss).",
    ),
    "comes back in half precision": (
        "It goes in as {old} and comes out as {new}: small updates are lost.",
        "Return the sum in the dtype of params: optax.apply_updates(params, updates).",
    ),
    "S adjusted twice": (
        "S counts more steps than its optimizer: it grows too early.",
        "tx.update adjusts S, so no adjust by hand follows.",
    ),
    "reported scaled": (
        "This result grows or falls with S: it is scaled, or unscaled twice.",
        "Report the loss and gradients that jmp_scale.value_and_grad returns, and pass "
        "that loss as value=.",
    ),
}
_NOTES: dict[str, tuple[str, str]] = {
    "no loss scale": (
        "No state of with_loss_scale and no loss scale is among the arguments: nothing "
        "skips a bad step.",
        "This is right in bfloat16 and float32. In float16 pass opt_state to the step, "
        "and return it: an S that a compiled step closes over never changes.",
    ),
    "not outermost": (
        "The state of with_loss_scale is within that of {what}: a wrapper outside also "
        "sees skipped steps, and may hide an overflow.",
        _OUTERMOST,
    ),
    "no value": (
        "A NaN loss counts as an overflow: S falls, though no S helps.",
        "Pass the loss: tx.update(grads, opt_state, params, value=loss).",
    ),
    "counts skipped steps": (
        "It changes on a skipped step, as on any other.",
        "This is right for counters, metrics and data. Keep statistics and averages by "
        "jmp_scale.select_tree(opt_state.applied, new, old).",
    ),
    "comes back unchanged": (
        "It comes back from an applied step as it went in.",
        "This is right if it is frozen. Otherwise return the parameters that "
        "optax.apply_updates returns.",
    ),
    "compiles twice": (
        "It goes in as {old} and comes out as {new}: the second call recompiles, and "
        "lax.scan refuses the step.",
        "Pass the first one with the type of the others: jnp.asarray(x, dtype).",
    ),
}
_ROWS: dict[Level, dict[str, tuple[str, str]]] = {
    "error": _ERRORS,
    "warning": _WARNINGS,
    "note": _NOTES,
}
RULES = {
    name: Rule(level, *row)
    for level, rows in _ROWS.items()
    for name, row in rows.items()
}
