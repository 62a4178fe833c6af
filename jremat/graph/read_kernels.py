"""A jaxpr as operations: calls entered, loops and branches with their inside, slices and stacks made plain."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jremat.graph.kernels import alive, kernels_of, scattered, split_sum
from jremat.graph.layouts import is_matrix, layout_of, transposed_within, turned_back, untransposed
from jremat.graph.operations import Computation, Op, Value
from jremat.graph.rules import ALIASES, FREE, FUSIBLE, IN_PLACE, PURE, Rules
from jremat.graph.trace import MARK, device_bytes
from jremat.jax_internals import REMAT, SCAN, WHILE, inner_jaxprs, loop_parts, on_host, opened, scopes, tagged_name


def read_program(jaxpr: Any, rules: Rules) -> Computation:
    """The kernels of a jaxpr, loops and branches inside included."""
    return _Reader(rules).computation(opened(jaxpr))


class _Reader:
    """Reads a jaxpr into operations, then groups them into kernels."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.ops: list[Op] = []
        self.made: dict[Any, list[Value]] = {}  # results by what is done to what, to do nothing twice
        self.zeros: dict[Any, Op] = {}  # what zeroes the stacks of one shape
        self.around = ""  # name scopes of the calls entered

    def computation(
        self,
        jaxpr: Any,
        sliced: Sequence[bool] = (),
        carried: Sequence[int | None] = (),
        sunk: Collection[int] = (),
        length: int = 1,
    ) -> Computation:
        """Read one computation.

        Args:
            jaxpr: open.
            sliced: which inputs are slices of stacks that the caller holds.
            carried: for a loop's body, the place of each carried output among the inputs; None: written to a stack.
            sunk: inputs that are constants, made inside.
            length: how often a loop's body runs, so how many slices a stack has.
        """
        outer = self.ops, self.made, self.zeros, self.around
        self.ops, self.made, self.zeros, self.around = [], {}, {}, ""
        env: dict[Any, Value] = {}
        inputs = []
        for k, var in enumerate(jaxpr.invars):
            given = Value(var.aval, device_bytes(var.aval), held=True)
            inputs.append(given)
            if k < len(sliced) and sliced[k]:
                # XLA slices the stack where the slice is read: a kernel of its own before a matmul, else fused
                env[var] = self._op("slice of a stack", None, None, [given], [var.aval]).outputs[0]
            elif k in sunk:
                env[var] = self._op("broadcast_in_dim", None, None, [], [var.aval]).outputs[0]
            else:
                env[var] = given
        for var in jaxpr.constvars:
            env[var] = Value(var.aval, device_bytes(var.aval), held=True)
        self._equations(jaxpr, env, None)
        outputs = [self._value(v, env) for v in jaxpr.outvars]
        for k, place in enumerate(carried):
            if place is None:
                write = self._op("write to a stack", None, None, [outputs[k]], [])
                outputs[k], write.defines = write.inputs[0], length * outputs[k].nbytes
        result = self._op(
            "result", None, None, [v for k, v in enumerate(outputs) if not carried or carried[k] is not None], []
        )
        ops = alive(scattered(self.ops))
        self.ops, self.made, self.zeros, self.around = outer
        kernels = kernels_of(ops, self.rules)
        assert result in ops
        return Computation(inputs, outputs, kernels, tuple(carried), self.rules.loops_wait)

    def _value(self, v: Any, env: dict[Any, Value]) -> Value:
        if isinstance(v, core.Literal):
            return Value(v.aval, device_bytes(v.aval), held=not getattr(v.aval, "shape", ()))
        return env[v]

    def _op(self, name: str, eqn: Any, call: Any, inputs: list[Value], avals: Iterable[Any]) -> Op:
        op = Op(name, eqn, call, inputs, [], self.around)
        op.outputs = [Value(aval, device_bytes(aval), op) for aval in avals]
        for value in inputs:
            value.users.append(op)
        self.ops.append(op)
        layout = layout_of(op)
        for value in op.outputs:
            value.layout = layout
        return op

    def _equations(self, jaxpr: Any, env: dict[Any, Value], call: Any) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            inputs = self._as_read(eqn, [self._value(v, env) for v in eqn.invars])
            tag = tagged_name(eqn.primitive, eqn.params)
            if tag is not None:
                if inputs[0].tag is None or inputs[0].tag.startswith(MARK):  # a name of the user's over one of ours
                    inputs[0].tag = tag
                env[eqn.outvars[0]] = inputs[0]
            elif name == "convert_element_type" and _widened_back(eqn, inputs[0]):
                assert inputs[0].maker is not None, "what was narrowed before was made"
                env[eqn.outvars[0]] = inputs[0].maker.inputs[0]
            elif (_passes_on(name, eqn) and not _between_memories(eqn)) or (
                name == "transpose" and turned_back(eqn, inputs[0])
            ):
                env[eqn.outvars[0]] = inputs[0]
            elif name in self.rules.entered or _runs_once(eqn) or _by_platform(eqn):
                self._enter(eqn, inputs, env)
            else:
                self._bind(eqn, inputs, env, call)

    def _as_read(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Inputs in a layout that the operation can read: a copy stands before it where XLA can't do without."""
        name = eqn.primitive.name
        if name == "dot_general":
            inputs = [untransposed(v) for v in inputs]
            return [self._copy(v, eqn, None) if v.layout == "mixed" else v for v in inputs]
        # a matrix is turned in passing, beside another too
        layouts = {"" if v.layout == "turned" and is_matrix(v) else v.layout for v in inputs}
        if name in FUSIBLE and "matmul" in layouts and layouts & self.rules.unlike_matmuls:
            return [self._relaid(v, eqn, None) if v.layout == "matmul" else v for v in inputs]
        return inputs

    def _enter(self, eqn: Any, inputs: list[Value], env: dict[Any, Value]) -> None:
        inner = opened(inner_jaxprs(eqn)[_branch(eqn)][0])
        given = inputs[len(inputs) - len(inner.invars) :]
        if eqn.primitive.name == REMAT and eqn.params.get("prevent_cse", True):
            # JAX puts an optimization barrier before what is recomputed: all of its inputs must be there
            given = self._barrier(eqn, given)
        scope = {var: Value(var.aval, device_bytes(var.aval), held=True) for var in inner.constvars}
        scope |= dict(zip(inner.invars, given))
        outer, self.around = self.around, "/".join(filter(None, (self.around, scopes(eqn))))
        self._equations(inner, scope, eqn)
        self.around = outer
        for out, made in zip(eqn.outvars, inner.outvars):
            env[out] = self._value(made, scope)

    def _barrier(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        op = self._op("optimization_barrier", eqn, None, inputs, [v.aval for v in inputs])
        op.in_place = {k: k for k in range(len(inputs))}
        for made, given in zip(op.outputs, inputs):
            made.tag, made.held = given.tag, given.held
        return op.outputs

    def _bind(self, eqn: Any, inputs: list[Value], env: dict[Any, Value], call: Any) -> None:
        name = eqn.primitive.name
        if name == "optimization_barrier":
            made = self._barrier(eqn, inputs)
        elif name == SCAN:
            made = self._scan(eqn, inputs, call)
        elif name == WHILE:
            made = self._while(eqn, inputs, call)
        else:
            key = _same(eqn, inputs) if name in PURE else None
            made = self.made[key] if key in self.made else self._results(eqn, inputs, call)
            if key is not None:
                self.made[key] = made
        env |= dict(zip(eqn.outvars, made, strict=True))

    def _results(self, eqn: Any, inputs: list[Value], call: Any) -> list[Value]:
        """The results of one equation that is no loop."""
        name, avals = eqn.primitive.name, [v.aval for v in eqn.outvars]
        if name == "split":  # as many slices: each is fused on its own
            return [self._op("slice", eqn, call, inputs, [aval]).outputs[0] for aval in avals]
        if name == "conv_general_dilated":
            inputs = self._convolved(inputs, eqn, call)
        if name == "select_and_scatter_add":
            return self._scattered_back(eqn, inputs, call)
        op = self._op(name, eqn, call, inputs, avals)
        if name in IN_PLACE:
            op.in_place = {0: 0}
        jaxprs = inner_jaxprs(eqn) if name not in self.rules.opaque else []
        op.inner = tuple(self.computation(opened(j)) for j, _ in jaxprs)
        return [self._whole(op)] if name == "dot_general" else op.outputs

    def _convolved(self, inputs: list[Value], eqn: Any, call: Any) -> list[Value]:
        """A convolution's input and kernel as cuDNN reads them.

        The input is written anew with zeros that cuDNN can't think: between elements, or more at one end than at the
        other. A gradient of the input, known by its reversed kernel, needs none; that of a transposed convolution's
        kernel has its operands change places, both written anew.

        Source: XLA's gpu/transforms/conv_rewriter.cc and conv_padding_legalization.cc; algebraic_simplifier.cc
        (SwapConvOperands).
        """
        value, kernel = inputs
        between = set(eqn.params["lhs_dilation"]) != {1}
        if between and _window_is_large(eqn):
            return [self._copy(given, eqn, call) for given in inputs]
        if _reversed(kernel) if between else all(low == high for low, high in eqn.params["padding"]):
            return inputs
        return [self._padded(value, between or set(eqn.params["rhs_dilation"]) == {1}, eqn, call), kernel]

    def _padded(self, value: Value, whole: bool, eqn: Any, call: Any) -> Value:
        """A convolution's input with all of its zeros written, or with those that one end has more.

        The forward needs all of them, its kernel's gradient the difference; one array serves both where they agree.
        """
        padding, dilated = eqn.params["padding"], eqn.params["lhs_dilation"]
        axes = eqn.params["dimension_numbers"].lhs_spec[2:]
        kept = [0 if whole else min(pair) for pair in padding]
        added = tuple((low - least, high - least) for (low, high), least in zip(padding, kept))
        key = "padded", id(value), axes, added, dilated
        if key not in self.made:
            shape = list(eqn.invars[0].aval.shape)
            for axis, (low, high), step in zip(axes, added, dilated):
                shape[axis] = (shape[axis] - 1) * step + 1 + low + high
            self.made[key] = self._op("padded", eqn, call, [value], [value.aval.update(shape=tuple(shape))]).outputs
        return self.made[key][0]

    def _scattered_back(self, eqn: Any, inputs: list[Value], call: Any) -> list[Value]:
        """A maximum pooling's gradient: the place of each maximum, found again, and a scatter into zeros.

        The zeros are those that a ReLU of that shape compares with: they are then written before it, and copied.

        Source: XLA's select_and_scatter_expander.cc.
        """
        source, operand = inputs
        shared = [op for op in self.ops if op.name == "max" and op.outputs[0].aval.shape == operand.aval.shape]
        zeros = self._op("broadcast_in_dim", eqn, call, [], [operand.aval] * (2 if shared else 1))
        if shared:
            self.ops.remove(zeros)
            self.ops.insert(self.ops.index(shared[0]), zeros)
        for op in shared:
            op.inputs.append(zeros.outputs[1])
            zeros.outputs[1].users.append(op)
        places = [np.dtype("int32")] * len(source.aval.shape)  # beside the maxima themselves
        avals = [source.aval.update(dtype=dtype) for dtype in (np.dtype("float32"), *places)]
        found = self._op("reduce_window_max", eqn, call, [operand], avals).outputs[1:]
        op = self._op("scatter", eqn, call, [zeros.outputs[0], *found, source], [operand.aval])
        op.in_place = {0: 0}
        return op.outputs

    def _whole(self, op: Op) -> Value:
        """A matmul's result; of one that is split along what it sums over, the sum of its parts."""
        made = op.outputs[0]
        parts, uneven = split_sum(op, self.rules)
        if parts == 1:
            return made
        if uneven:  # then both operands are padded first
            for k, value in enumerate(op.inputs):
                value.users.remove(op)
                op.inputs[k] = self._copy(value, op.eqn, op.call)
                op.inputs[k].users.append(op)
            self.ops.remove(op)
            self.ops.append(op)
        made.nbytes = parts * math.prod(made.aval.shape) * 4  # in float32
        whole = self._op("sum of parts", op.eqn, op.call, [made], [made.aval]).outputs[0]
        whole.layout = made.layout
        return whole

    def _scan(self, eqn: Any, inputs: list[Value], call: Any) -> list[Value]:
        (consts, carry), length = loop_parts(eqn), eqn.params["length"]
        if not length:  # what is carried in comes out
            return [*inputs[consts : consts + carry], *self._zeros(eqn, call, [v.aval for v in eqn.outvars[carry:]])]
        body = opened(eqn.params["jaxpr"])
        sliced = [k >= consts + carry for k in range(len(body.invars))]
        carried = [consts + k if k < carry else None for k in range(len(body.outvars))]
        inner = self.computation(body, sliced, carried, length=length)
        sunk = {k for k in range(consts) if _is_constant(inputs[k]) and _only_starts(inner.inputs[k])}
        if sunk:
            inner = self.computation(body, sliced, carried, sunk, length)
        inputs = [
            self._relaid(v, eqn, call)
            if cut and (v.layout in ("turned", "mixed") or transposed_within(v, slice_))
            else v
            for cut, v, slice_ in zip(sliced, inputs, inner.inputs)
        ]
        zeros = self._zeros(eqn, call, [v.aval for v in eqn.outvars[carry:]])
        op = self._op(SCAN, eqn, call, [*inputs, *zeros], [v.aval for v in eqn.outvars])
        op.in_place = {k: consts + k for k in range(carry)}
        op.in_place |= {carry + k: len(inputs) + k for k in range(len(zeros))}
        op.inner = (inner,)
        for made, value in zip(op.outputs[carry:], inner.outputs[carry:]):
            made.layout = value.layout if value.layout in ("turned", "mixed", "matmul") else ""
        return op.outputs

    def _zeros(self, eqn: Any, call: Any, avals: list[Any]) -> list[Value]:
        """The stacks of a loop, zeroed before it and then written in place.

        Those of one shape are zeroed by one kernel; where it zeroes those of other loops too, they wait in memory.
        """
        made = []
        if not self.rules.zeroed_together:
            self.zeros.clear()
        for aval in avals:
            op = self.zeros.get((aval.shape, aval.dtype))
            if op is None:
                op = self.zeros[aval.shape, aval.dtype] = self._op("zeros", eqn, call, [], [])
            value = Value(aval, device_bytes(aval), op)
            op.outputs.append(value)
            made.append(value)
        return made

    def _relaid(self, value: Value, eqn: Any, call: Any) -> Value:
        """A copy in another layout; one serves all that read it element by element."""
        for user in value.users:
            if user.name == "relaid":
                return user.outputs[0]
        return self._copy(value, eqn, call)

    def _copy(self, value: Value, eqn: Any, call: Any) -> Value:
        """A copy in the layout of one reader."""
        copy = self._op("relaid", eqn, call, [value], [value.aval]).outputs[0]
        copy.layout = "settled"
        return copy

    def _while(self, eqn: Any, inputs: list[Value], call: Any) -> list[Value]:
        skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body = opened(eqn.params["body_jaxpr"])
        inner = self.computation(body, (), [consts + k for k in range(len(body.outvars))])
        op = self._op(WHILE, eqn, call, inputs, [v.aval for v in eqn.outvars])
        op.in_place = {k: skip + consts + k for k in range(len(op.outputs))}
        op.inner = (inner,)
        return op.outputs


def _window_is_large(eqn: Any) -> bool:
    """Whether a convolution's kernel spans more places than its result has, as where it is a gradient."""
    numbers = eqn.params["dimension_numbers"]
    sizes = ((eqn.invars[1], numbers.rhs_spec), (eqn.outvars[0], numbers.out_spec))
    window, result = (math.prod(v.aval.shape[axis] for axis in spec[2:]) for v, spec in sizes)
    return window > result


def _reversed(kernel: Value) -> bool:
    """Whether a convolution's kernel is another's, turned round."""
    while kernel.maker is not None and kernel.maker.name == "transpose":
        kernel = kernel.maker.inputs[0]
    return kernel.maker is not None and kernel.maker.name == "rev"


def _runs_once(eqn: Any) -> bool:
    """Whether an equation is a loop of one turn: XLA unrolls it. Its one slice of a stack is all of the stack."""
    return eqn.primitive.name == SCAN and eqn.params["length"] == 1


def _by_platform(eqn: Any) -> bool:
    """Whether an equation has a branch for each kind of device: one alone is compiled."""
    return bool(eqn.params.get("branches_platforms"))


def _branch(eqn: Any) -> int:
    """Which of the computations of an equation that is entered stands in the program for a GPU."""
    platforms = eqn.params.get("branches_platforms") or [None]
    return next((k for k, names in enumerate(platforms) if names is None or {"cuda", "gpu"} & set(names)), 0)


def _same(eqn: Any, inputs: list[Value]) -> Any:
    """What is equal for two equations that make the same value."""
    read = tuple(str(v) if isinstance(v, core.Literal) else id(value) for v, value in zip(eqn.invars, inputs))
    return eqn.primitive.name, read, str(eqn.outvars[0].aval), str(sorted(eqn.params.items(), key=lambda kv: kv[0]))


def _is_constant(value: Value) -> bool:
    """Whether a value is one number, many times."""
    return value.maker is not None and value.maker.name in FREE and all(v.held for v in value.maker.inputs)


def _only_starts(value: Value) -> bool:
    """Whether loops start from a value and nothing else reads it: XLA then makes it where the loop starts."""
    return bool(value.users) and all(user.name in (SCAN, WHILE) for user in value.users)


def _widened_back(eqn: Any, value: Value) -> bool:
    """Whether a value was narrowed only to be widened again: XLA then computes with the wide one."""
    maker = value.maker
    if maker is None or maker.name != "convert_element_type" or not eqn.outvars[0].aval.shape:
        return False
    wide, narrow = maker.inputs[0].aval.dtype, value.aval.dtype
    real = jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(narrow, jnp.floating)
    return real and wide == eqn.outvars[0].aval.dtype and wide.itemsize > narrow.itemsize


def _between_memories(eqn: Any) -> bool:
    """Whether a value goes from device to host memory, or back: a copy, and another buffer."""
    return on_host(eqn.invars[0].aval) != on_host(eqn.outvars[0].aval)


def _passes_on(name: str, eqn: Any) -> bool:
    """Whether the result is the same memory as the first input."""
    if not eqn.invars or isinstance(eqn.invars[0], core.Literal) or not hasattr(eqn.invars[0].aval, "dtype"):
        return False
    if not eqn.outvars:  # a callback for its effect alone, e.g. jax.debug.print
        return False
    given, made = eqn.invars[0].aval, eqn.outvars[0].aval
    if name in ALIASES:
        return len(eqn.outvars) == 1
    same = given.dtype == made.dtype and math.prod(given.shape) == math.prod(made.shape)
    if name == "integer_pow":
        return eqn.params["y"] == 1
    if name == "transpose":  # moving axes of length one moves nothing
        order = [axis for axis in eqn.params["permutation"] if given.shape[axis] != 1]
        return order == sorted(order)
    if name == "reduce_precision":
        return True  # remat puts it on what it keeps; it rounds nothing there
    return same and name in ("convert_element_type", "broadcast_in_dim", "reduce_sum", "reduce_max", "slice")
