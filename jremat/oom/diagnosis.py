"""From a report of memory, or from the step itself, to what took the memory and what would free it."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jremat.measure.buffers import Buffer
from jremat.measure.memory import compiled_memory
from jremat.measure.memory_analysis import Memory
from jremat.measure.targets import target as find_target
from jremat.oom.causes import Cause, find_causes, kind_of, shapes_of_arguments
from jremat.oom.cures import Cure, Subject, cures
from jremat.oom.dump import Dump
from jremat.oom.read import read_dump
from jremat.policy import NONE
from jremat.policy.shown import aligned, filled, human

_LISTED = 10


@dataclass(frozen=True)
class Diagnosis:
    """What was alive at the peak, and why.

    Attributes:
        dump: what was read, or compiled.
        causes: largest first.
        cures: changes of the step that free memory, compiled, where it was given; the least time first.
        memory: of the step as it is, where it was given.

    >>> from jremat.oom import Cause, Dump
    >>> cause = Cause("logits", "logits", 2**29, 2**28, "a chunked loss")
    >>> print(Diagnosis(Dump("a log", requested_bytes=2**30), (cause,)))
    read from a log
    asked for  1.0 GiB
    <BLANKLINE>
    causes, largest first
    1. 512.0 MiB [logits] logits. To do, about 256.0 MiB less: a chunked loss
    """

    dump: Dump
    causes: tuple[Cause, ...]
    cures: tuple[Cure, ...] = ()
    memory: Memory | None = None

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of the listed buffers by kind, most first."""
        shapes, found = shapes_of_arguments(self.dump), dict[str, int]()
        for buffer in self.dump.buffers:
            kind = kind_of(buffer, shapes)
            found[kind] = found.get(kind, 0) + buffer.nbytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        d = self.dump
        rows = [("asked for", d.requested_bytes), ("the device has", d.limit_bytes), ("in use", d.in_use_bytes)]
        rows += [("arguments", d.argument_bytes), ("results", d.output_bytes), ("temporaries", d.temp_bytes)]
        rows += [("donated", d.alias_bytes), ("fragmentation", d.fragmentation_bytes)]
        parts = [filled(f"read from {d.form}"), aligned([(name, human(n)) for name, n in rows if n], right=[1])]
        if d.buffers:
            part = (
                f", {human(d.listed_bytes)} listed of {human(d.total_bytes)}"
                if d.listed_bytes < 0.95 * d.total_bytes
                else ""
            )
            kinds = aligned([(kind, human(n)) for kind, n in self.by_kind.items()], right=[1])
            parts += ["", f"alive at the peak, by kind{part}", kinds]
            parts += ["", "the largest", aligned([_row(b, self.dump) for b in d.buffers[:_LISTED]], right=[0])]
        parts += ["", "causes, largest first" if self.causes else "no cause found among what the report lists"]
        parts += [filled(f"{number}. {cause.text}", "   ") for number, cause in enumerate(self.causes, 1)]
        if self.cures and self.memory:
            parts += ["", f"cures, the least time first ({self.memory.label})"]
            parts.append(aligned([("peak", "freed", "time", ""), *map(_cure_row, self.cures)], right=[0, 1, 2]))
        return "\n".join(part for part in parts if part is not None)

    __repr__ = __str__


def _row(buffer: Buffer, dump: Dump) -> tuple[str, ...]:
    shape = f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]" if buffer.dtype else ""
    path = re.sub(r"\[.*", "", buffer.what.rstrip("/"))  # older versions of JAX write parameters after the operation
    what = buffer.tag or "/".join(path.split("/")[-2:]) or buffer.instruction
    return human(buffer.nbytes), kind_of(buffer, shapes_of_arguments(dump)), shape, what, buffer.source


def _cure_row(cure: Cure) -> tuple[str, ...]:
    time = "?" if cure.seconds is None else f"{cure.seconds * 1e3:.3g} ms"
    return human(cure.peak_bytes), human(cure.freed_bytes), time, cure.what


def diagnose(
    dump: Path | str | None = None, step: Callable[..., Any] | None = None, *args: Any, target: Any = "local"
) -> Diagnosis:
    """What took the memory, by kind, which of it need not be there, and what would free it.

    Args:
        dump: a log with XLA's RESOURCE_EXHAUSTED error, ``*buffer-assignment.txt`` or ``*.hlo.pb`` of ``--xla_dump_to``
            or its folder, a device memory profile of JAX, the JSON of XProf's memory viewer; None: ``step`` alone.
        step: the function that ran out of memory, compiled again for ``target``, never run; None: the report alone.
            Without ``args``, it may be a function of ``policy`` that returns the step under it and its arguments, as
            ``jremat.plan`` takes it: the step without remat is read, and policies are tried as cures. A function that
            returns one number is a loss: its value and gradient by its first argument is the step, and ``jremat.fit``
            is tried, with three quarters of the peak where that fits the device already.
        args: of ``step``, arrays or ``jax.ShapeDtypeStruct``, in any pytrees.
        target: see ``jremat.measure.target``.

    Returns:
        Bytes by kind, causes, and cures with their compiled peaks where they can be tried on ``step``: donation, a
        policy, a plan, half of the batch, and a larger share of a GPU for the allocator.

    Raises:
        ValueError: neither of the two, or a report that is none.
        CompileError: XLA refuses the step; ``reason`` is ``out_of_memory`` where its compiler itself runs out.

    >>> import jax.numpy as jnp
    >>> sgd = lambda w: w - 0.1 * jax.grad(lambda w: jnp.sin(w).sum())(w)
    >>> found = diagnose(None, sgd, jax.ShapeDtypeStruct((1 << 20,), jnp.float32), target="cpu")
    >>> found.causes[0].slug, found.cures[0].what, found.cures[0].freed_bytes > 0
    ('not-donated', 'jax.jit(step, donate_argnums=(0,))', True)
    """
    if step is None:
        if dump is None:
            raise ValueError("dump: expected a report of memory, a step, or both, got neither")
        read = read_dump(dump)
        return Diagnosis(read, find_causes(read))
    report = read_dump(dump) if dump is not None else None
    under = loss = None
    if not args and takes_policy(step):
        under = step
        step, args = under(NONE)
    elif _is_loss(step, args):
        loss, step = step, jax.value_and_grad(step)
    kind = find_target(target)
    found = compiled_memory(step, *args, target=kind, num_buffers=200)
    compiled = Dump(
        f"the step, {found.label}" if "compiled" in found.label else f"the step, compiled for {found.label}",
        found.buffers,
        found.argument_bytes,
        found.output_bytes,
        found.temp_bytes,
        found.alias_bytes,
        limit_bytes=found.hbm_bytes,
    )
    if report:  # what the allocator said stands in no compile
        compiled = replace(compiled, requested_bytes=report.requested_bytes, in_use_bytes=report.in_use_bytes)
    why = find_causes(compiled)
    slugs = {cause.slug for cause in why}
    room = found.hbm_bytes if found.hbm_bytes and found.peak_bytes > found.hbm_bytes else found.peak_bytes * 3 // 4
    subject = Subject(step, args, found, kind, under, loss, room)
    return Diagnosis(compiled, why, cures(subject, "not-donated" in slugs, bool(slugs & _OF_ACTIVATIONS)), found)


_OF_ACTIVATIONS = {"saved-residuals", "float32-residuals", "logits", "attention-scores"}
"""Causes that a policy, a plan or a smaller batch can cure."""


def _is_loss(step: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function returns one floating-point number, and so is a loss and no step."""
    out = jax.tree.leaves(jax.eval_shape(step, *args))
    return len(out) == 1 and out[0].shape == () and jnp.issubdtype(out[0].dtype, jnp.floating)


def takes_policy(step: Callable[..., Any]) -> bool:
    """Whether a function's one argument is called ``policy``."""
    try:
        return [*inspect.signature(step).parameters] == ["policy"]
    except (TypeError, ValueError):  # a builtin
        return False
