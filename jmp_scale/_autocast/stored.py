"""Half-precision arrays of a program as float32 ones.

JAX adds up the cotangents of an array in its own dtype: in half precision the gradient
of a weight that is read many times, as in a loop, loses most of what it is made of. So
an array that is stored in half precision becomes a float32 one, of which a
half-precision copy is known. What is computed from such arrays alone is float32 too. An
operation that also reads other half-precision arrays runs as traced.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .. import _jaxpr, _jaxpr_rewrite
from .._jaxpr import Atom, Jaxpr, JaxprEqn, Literal, Program, Var, variables
from .._policy import is_half
from .higher_order import is_entered
from .products import looks_up_rows, mesh_of

_FLOAT32 = np.dtype("float32")


class Widened(NamedTuple):
    """A program in which half-precision variables are float32 ones."""

    jaxpr: Jaxpr
    renamed: dict[Var, Var]  # the float32 variables, by the half-precision ones
    dtypes: dict[Var, np.dtype]  # of the latter, by the former
    halves: set[Var]  # half-precision variables that are casts of the former


def is_in_half(atom: Atom) -> bool:
    """Whether an array, or what a reference holds, is half precision."""
    return is_half(_jaxpr.dtype_name(atom))


def widened(jaxpr: Jaxpr, stored: Iterable[Var], outputs: Iterable[Atom]) -> Widened:
    """Makes float32 variables of `stored`, and of what is computed from them alone.

    Of `outputs` too, as far as these are made of `stored` ones and of data.
    """
    tables = (eqn.invars[0] for eqn in jaxpr.eqns if looks_up_rows(eqn))
    program = _Program(stored, variables(tables), _parts_of(jaxpr, outputs))
    inputs = [program.renamed.get(v, v) for v in jaxpr.invars]
    for eqn in jaxpr.eqns:
        program.add(eqn)
    outputs = [program.float32_of(v) for v in jaxpr.outvars]
    changed = _jaxpr_rewrite.excerpt(jaxpr, program.eqns, inputs, outputs)
    return Widened(changed, program.renamed, program.dtypes, program.halves)


class _Program:
    """The equations of a program, which are added one by one."""

    def __init__(
        self, stored: Iterable[Var], tables: Iterable[Var], kept: set[Var]
    ) -> None:
        self.eqns: list[JaxprEqn] = []
        self.renamed: dict[Var, Var] = {}
        self.dtypes: dict[Var, np.dtype] = {}
        self.halves: set[Var] = set()
        self._casts: dict[Var, Atom] = {}  # casts to float32: the result, the operand
        self._plain: set[Var] = set()  # computed from integers and literals alone
        self._wide: set[Var] = set()  # as float32, from stored arrays alone
        self._made: set[Var] = set()  # half, from stored arrays alone, by products too
        self._tables = {*tables}
        self._rows: set[Var] = set()  # of tables, that data chooses
        self._kept = kept  # float32, if an operand is
        for v in stored:
            self._rename(v)

    def float32_of(self, atom: Atom) -> Atom:
        """Returns the float32 variable of a half-precision one; others as they are."""
        if isinstance(atom, Literal):
            return atom
        return self._casts.get(atom) or self.renamed.get(atom, atom)

    def add(self, eqn: JaxprEqn) -> None:
        """Adds an equation, in float32 if it reads float32 variables of half ones."""
        inputs = [
            v if isinstance(v, Literal) else self._casts.get(v, v) for v in eqn.invars
        ]
        eqn = eqn.replace(invars=inputs)
        floating = [v for v in variables(inputs) if _jaxpr.is_floating(v)]
        self._note(eqn, floating)
        for v in self._read_often(eqn):
            # JAX adds up its cotangents, whatever it is computed from.
            if is_in_half(v) and v not in self.renamed:
                self._cast(v, self._rename(v), eqn)
        others = [v for v in floating if is_in_half(v) and v not in self.renamed]
        # Zeros, to which a loop adds the gradients that a program computes itself.
        starts = self._plain.intersection(others) if is_entered(eqn) else ()
        is_cast = eqn.primitive.name == "convert_element_type"
        is_to_half = is_cast and is_in_half(eqn.outvars[0])
        if is_to_half and not self._wide.isdisjoint(floating):
            # It would round the cotangent, as of a sum.
            self._cast(floating[0], self._rename(eqn.outvars[0]), eqn)
        elif self.renamed.keys().isdisjoint(floating) and not starts:
            self.eqns.append(eqn)
        elif is_cast and _jaxpr.is_float32(eqn.outvars[0]):
            self._casts[eqn.outvars[0]] = self.renamed[floating[0]]
        elif is_cast and not is_to_half:
            self.eqns.append(eqn.replace(invars=[self.renamed[floating[0]]]))
        elif is_entered(eqn):
            self._add_call(eqn)
        else:
            self._add_operation(eqn, floating, self._plain.issuperset(others))

    def _note(self, eqn: JaxprEqn, floating: Sequence[Var]) -> None:
        """Notes what the results are computed from."""
        is_product = eqn.primitive.name in _jaxpr.PRODUCTS
        is_data = is_product or is_entered(eqn) or _jaxpr.has_effects(eqn)
        is_plain = self._plain.issuperset(floating)
        if is_plain and not eqn.effects:
            self._plain.update(eqn.outvars)
        elif self._is_part(eqn) or (all(map(self._is_known, floating)) and not is_data):
            self._wide.update(filter(_jaxpr.is_float32, eqn.outvars))
        are_made = all(v in self._made or self._is_known(v) for v in floating)
        if are_made and not (is_plain or looks_up_rows(eqn)):
            self._made.update(filter(is_in_half, eqn.outvars))

    def _read_often(self, eqn: JaxprEqn) -> list[Var]:
        """Returns constants of a loop, and a table of rows that is made."""
        if looks_up_rows(eqn):
            return [v for v in variables(eqn.invars[:1]) if v in self._made]
        loop = _jaxpr.scan_of(eqn)
        return variables(eqn.invars[: loop.consts]) if loop else []

    def _add_operation(
        self, eqn: JaxprEqn, floating: Sequence[Var], is_alone: bool
    ) -> None:
        """Adds an operation; `is_alone`: it reads no other half-precision arrays."""
        name = eqn.primitive.name
        finds_rows = looks_up_rows(eqn)
        reads_rows = not (finds_rows or self._rows.isdisjoint(floating))
        if self._can_be_float32(eqn, is_alone and not reads_rows):
            self._add_in_float32(eqn)
            if finds_rows or (name == "reshard" and reads_rows):
                rows = map(self.float32_of, eqn.outvars)
                self._rows.update(eqn.outvars, variables(rows))
        else:
            self._add_in_half(eqn)
            # What a product returns is data, and so is what is computed from rows.
            if is_alone and not reads_rows and name not in _jaxpr.PRODUCTS:
                for v in filter(is_in_half, eqn.outvars):
                    self._cast(v, self._rename(v), eqn)

    def _can_be_float32(self, eqn: JaxprEqn, is_alone: bool) -> bool:
        """Whether it can run in float32, as traced if it reads no other half ones."""
        name = eqn.primitive.name
        if name in _jaxpr.REFERENCES:
            return self._is_renamed(eqn.invars[0])
        if name in _jaxpr.PRODUCTS:
            is_partly_float32 = any(map(_jaxpr.is_float32, eqn.invars[:2]))
            return is_partly_float32 and _jaxpr.is_float32(eqn.outvars[0])
        if name == "reshard":
            # Devices add up the gradients of matrices in half precision, those of rows
            # in float32. A cast belongs to one mesh.
            (table,), (result,) = eqn.invars, eqn.outvars
            stays = mesh_of(table) == mesh_of(result) and result not in self._tables
            return not (is_alone and stays)
        # `add_any` adds up cotangents, where the program has gradients itself.
        is_wanted = is_alone or not self._kept.isdisjoint(eqn.outvars)
        return name == "add_any" or (is_wanted and name in _jaxpr.ANY_DTYPE)

    def _is_part(self, eqn: JaxprEqn) -> bool:
        """Whether it passes a stored array on to a result that stays float32."""
        reads = any(v in self.dtypes or v in self._wide for v in variables(eqn.invars))
        return reads and _passes_on(eqn) and not self._kept.isdisjoint(eqn.outvars)

    def _is_known(self, v: Var) -> bool:
        """Whether a variable is computed from stored arrays and literals alone."""
        known = self._wide, self._plain, self.renamed, self.dtypes
        return v not in self._rows and any(v in group for group in known)

    def _is_renamed(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self.renamed

    def _rename(self, v: Var) -> Var:
        new = self.renamed[v] = _jaxpr_rewrite.with_dtype(v, _FLOAT32)
        self.dtypes[new] = _jaxpr.dtype_of(v)
        return new

    def _cast(self, old: Var, new: Var, near: JaxprEqn) -> None:
        self.eqns.append(_jaxpr_rewrite.cast(old, new, near))

    def _add_in_half(self, eqn: JaxprEqn) -> None:
        """Adds an equation as traced, with casts in front of it."""
        inputs = [*eqn.invars]
        for i, v in enumerate(inputs):
            if isinstance(v, Var) and v in self.renamed:
                wide = self._repeated(self.renamed[v], eqn)
                inputs[i] = half = _jaxpr_rewrite.with_dtype(wide, _jaxpr.dtype_of(v))
                self._cast(wide, half, eqn)
                self.halves.add(half)
        self.eqns.append(eqn.replace(invars=inputs))

    def _repeated(self, v: Var, near: JaxprEqn) -> Var:
        """Repeats the entries of an operand as an equation does.

        JAX adds up the cotangents of an entry that an operation repeats.
        """
        if near.primitive.name not in _jaxpr.REPEATS:
            return v
        result = near.outvars[0]
        if _jaxpr.shape(v) == _jaxpr.shape(result):
            return v
        new = _jaxpr_rewrite.with_dtype(result, _FLOAT32)
        self.eqns.append(_jaxpr_rewrite.broadcast(v, new, near))
        return new

    def _add_in_float32(self, eqn: JaxprEqn) -> None:
        inputs = [self._widened(v, eqn) for v in eqn.invars]
        results = [self._rename(v) if is_in_half(v) else v for v in eqn.outvars]
        # jax 0.10 on: of products and sums.
        params = {k: None if k == "out_dtype" else x for k, x in eqn.params.items()}
        if update := params.get("update_jaxpr"):  # of a scatter
            params["update_jaxpr"] = widened(update, update.invars, ()).jaxpr
        self.eqns.append(eqn.replace(invars=inputs, outvars=results, params=params))

    def _add_call(self, eqn: JaxprEqn) -> None:
        """Adds a call, of which `higher_order` makes one of float32 arrays."""
        known = self._plain.union(self.renamed)
        flags = [
            is_in_half(v) and (isinstance(v, Literal) or v in known) for v in eqn.invars
        ]
        results = _results_in_float32(eqn, flags, self._are_kept(eqn))
        pairs = zip(eqn.outvars, results, strict=True)
        outputs = [self._rename(v) if is_wide else v for v, is_wide in pairs]
        pairs = zip(eqn.invars, flags, strict=True)
        inputs = [self._widened(v, eqn) if is_wide else v for v, is_wide in pairs]
        self.eqns.append(eqn.replace(invars=inputs, outvars=outputs))

    def _are_kept(self, eqn: JaxprEqn) -> list[bool]:
        """Tells which results of a call stay float32 where data is added to them.

        A carry that begins as a stored array does: what each turn adds to its
        cotangent is added in its dtype.
        """
        are_kept = [v in self._kept for v in eqn.outvars]
        if loop := _jaxpr.scan_of(eqn):
            first = eqn.invars[loop.consts : loop.consts + loop.carry]
            are_kept[: loop.carry] = [
                self._is_renamed(v) and v not in self._rows for v in first
            ]
        return are_kept

    def _widened(self, atom: Atom, near: JaxprEqn) -> Atom:
        """Returns a half-precision atom in float32, and others as they are."""
        if not is_in_half(atom):
            return atom
        if isinstance(atom, Literal):
            return _jaxpr_rewrite.cast_literal(atom, _FLOAT32)
        if atom not in self.renamed:
            self._cast(atom, self._rename(atom), near)
        return self.renamed[atom]


def _results_in_float32(
    eqn: JaxprEqn, flags: Sequence[bool], are_kept: Sequence[bool]
) -> list[bool]:
    """Tells which results of a call are computed from float32 operands alone.

    Of those that are kept one operand suffices.
    """
    if not any(map(is_in_half, eqn.outvars)):
        return [False] * len(eqn.outvars)
    bodies, loop = _jaxpr.subjaxprs(eqn), _jaxpr.scan_of(eqn)
    if loop is None:
        if eqn.primitive.name == "cond":
            flags = flags[1:]
        else:
            bodies = bodies[:1]
        results = [_outputs_in_float32(body, flags, are_kept) for body in bodies]
        by_output = zip(are_kept, *results, strict=True)
        return [any(each) if is_kept else all(each) for is_kept, *each in by_output]
    first, last = loop.consts, loop.consts + loop.carry
    while True:  # until a carry has one dtype in all turns
        results = _outputs_in_float32(loop.body, flags, are_kept)
        pairs = zip(flags[first:last], results[: loop.carry], strict=True)
        carry = [before and after for before, after in pairs]
        if carry == [*flags[first:last]]:
            return [*carry, *results[loop.carry :]]
        flags = [*flags[:first], *carry, *flags[last:]]
        pairs = zip(are_kept[: loop.carry], carry, strict=True)
        are_kept = [*map(all, pairs), *are_kept[loop.carry :]]


def _outputs_in_float32(
    body: Program, flags: Sequence[bool], are_kept: Sequence[bool]
) -> list[bool]:
    flat = _inlined(body)
    stored = itertools.compress(flat.invars, flags)
    program = widened(flat, stored, itertools.compress(flat.outvars, are_kept))
    return [isinstance(v, Var) and v in program.dtypes for v in program.jaxpr.outvars]


def _inlined(body: Program) -> Jaxpr:
    return _jaxpr_rewrite.inlined(body, lambda e: e.primitive.name in _jaxpr.CALLS)[0]


def _passes_on(eqn: JaxprEqn) -> bool:
    """Whether an operation adds to the cotangents of its operands in any dtype."""
    return eqn.primitive.name in _jaxpr.ANY_DTYPE | {"convert_element_type"}


def _is_read(eqn: JaxprEqn) -> bool:
    return _passes_on(eqn) or is_entered(eqn)


def _is_no_product(eqn: JaxprEqn) -> bool:
    is_product = eqn.primitive.name in _jaxpr.PRODUCTS
    return not is_product and any(map(_jaxpr.is_floating, eqn.outvars))


def _parts_of(
    jaxpr: Jaxpr,
    outputs: Iterable[Atom],
    is_open: Callable[[JaxprEqn], bool] = _passes_on,
) -> set[Var]:
    """Finds the variables of which such operations make outputs, these included."""
    found = {*variables(outputs)}
    for eqn in reversed(jaxpr.eqns):
        if not found.isdisjoint(eqn.outvars) and is_open(eqn):
            found.update(variables(eqn.invars))
    return found


def places_as_stored(eqn: JaxprEqn, stored: Collection[Var]) -> list[int]:
    """Returns the positions of operands that a call gets in half precision.

    Each turn of a scan reads one slice of a stack, of which a float32 copy would be
    made as a whole. Behind the barriers of a checkpoint float32 copies of weights would
    be made for the backward pass, but what it returns may need the float32 ones.
    """
    if loop := _jaxpr.scan_of(eqn):
        return [*range(loop.consts + loop.carry, len(eqn.invars))]
    if _jaxpr.name_of(eqn) != "remat2":
        return []
    (body,) = _jaxpr.subjaxprs(eqn)
    flat = _inlined(body)
    pairs = zip(eqn.outvars, flat.outvars, strict=True)
    returned = [inner for outer, inner in pairs if outer in stored]
    needed = _parts_of(flat, returned, _is_read)
    return [i for i, v in enumerate(flat.invars) if v not in needed]


def places_rounded_in_turns(eqn: JaxprEqn) -> list[int]:
    """Returns the positions of carries of a loop that it passes on as traced.

    Where nothing else does, what a turn adds to a cotangent is half precision.
    """
    loop = _jaxpr.scan_of(eqn)
    if loop is None:
        return []
    flat, last = _inlined(loop.body), loop.consts + loop.carry
    outputs = flat.outvars[: loop.carry]
    found = {*filter(is_in_half, _parts_of(flat, outputs, _is_no_product))}
    found -= _parts_of(flat, outputs, _is_read)
    return [i for i in range(loop.consts, last) if flat.invars[i] in found]


def loops_that_add_up(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Finds loops within an equation that read half-precision arrays in each turn.

    As traced, they add up the cotangents of these arrays in half precision.
    """
    found = []
    for each in _jaxpr.equations_within(eqn):
        # A `while` has a gradient only within a function that has its own.
        loop = _jaxpr.loop_of(each)
        if loop is not None and loop.trips != 1:
            constants = each.invars[loop.offset : loop.offset + loop.consts]
            if any(map(is_in_half, constants)):
                found.append(each)
    return found
