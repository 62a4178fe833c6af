"""From a report of memory, or from the step itself, to what took the memory and what would free it."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jremat.measure.buffers import Buffer
from jremat.measure.compile import as_jitted
from jremat.measure.memory import compiled_memory
from jremat.measure.memory_analysis import Memory
from jremat.oom.causes import Cause, find_causes, kind_of, shapes_of_arguments
from jremat.oom.dump import Dump
from jremat.oom.read import read_dump
from jremat.policy import FULL, NONE
from jremat.policy.shown import aligned, filled, human

_LISTED = 10


@dataclass(frozen=True)
class Diagnosis:
    """What was alive at the peak, and why.

    Attributes:
        dump: what was read, or compiled.
        causes: largest first.
        proofs: slug, and the compiled peak with that cause's cure, where the step was given and the cure applies.
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
    proofs: tuple[tuple[str, int], ...] = ()
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
        proofs = dict(self.proofs)
        for number, cause in enumerate(self.causes, 1):
            parts.append(filled(f"{number}. {cause.text}", "   "))
            if cause.slug in proofs and self.memory:
                saved = self.memory.peak_bytes - proofs[cause.slug]
                label = self.memory.label
                parts.append(
                    filled(f"   with that cure the peak is {human(proofs[cause.slug])}, {human(saved)} less ({label})")
                )
        return "\n".join(part for part in parts if part is not None)

    __repr__ = __str__


def _row(buffer: Buffer, dump: Dump) -> tuple[str, ...]:
    shape = f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]" if buffer.dtype else ""
    path = re.sub(r"\[.*", "", buffer.what.rstrip("/"))  # older versions of JAX write parameters after the operation
    what = buffer.tag or "/".join(path.split("/")[-2:]) or buffer.instruction
    return human(buffer.nbytes), kind_of(buffer, shapes_of_arguments(dump)), shape, what, buffer.source


def diagnose(
    dump: Path | str | None = None, step: Callable[..., Any] | None = None, *args: Any, target: Any = "local"
) -> Diagnosis:
    """What took the memory, by kind, which of it need not be there, and what would free it.

    Args:
        dump: a log with XLA's RESOURCE_EXHAUSTED error, ``*buffer-assignment.txt`` or ``*.hlo.pb`` of ``--xla_dump_to``
            or its folder, a device memory profile of JAX, the JSON of XProf's memory viewer; None: ``step`` alone.
        step: the function that ran out of memory, compiled again for ``target``, never run; None: the report alone.
            Without ``args``, it may be a function of ``policy`` that returns the step under it and its arguments, as
            ``jremat.plan`` takes it: the step without remat is read, and full remat is tried as a cure.
        args: of ``step``, arrays or ``jax.ShapeDtypeStruct``, in any pytrees.
        target: see ``jremat.measure.target``.

    Returns:
        Bytes by kind, causes with their cures, and compiled peaks where a cure could be tried on ``step``: donation,
        and full remat where it takes a policy.

    Raises:
        ValueError: neither of the two, or a report that is none.
        CompileError: XLA refuses the step; ``reason`` is ``out_of_memory`` where its compiler itself runs out.

    >>> import jax.numpy as jnp
    >>> sgd = lambda w: w - 0.1 * jax.grad(lambda w: jnp.sin(w).sum())(w)
    >>> found = diagnose(None, sgd, jax.ShapeDtypeStruct((1 << 20,), jnp.float32), target="cpu")
    >>> found.causes[0].slug, dict(found.proofs)["not-donated"] < found.memory.peak_bytes
    ('not-donated', True)
    """
    if step is None:
        if dump is None:
            raise ValueError("dump: expected a report of memory, a step, or both, got neither")
        read = read_dump(dump)
        return Diagnosis(read, find_causes(read))
    report = read_dump(dump) if dump is not None else None
    under = None
    if not args and takes_policy(step):
        under = step
        step, args = under(NONE)
    found = compiled_memory(step, *args, target=target, num_buffers=200)
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
    proofs = []
    if "not-donated" in slugs and (places := _replaced(step, args)):
        donating = jax.jit(lambda *given: as_jitted(step, given)[0](*given), donate_argnums=places)
        proofs.append(("not-donated", compiled_memory(donating, *args, target=target, num_buffers=0).peak_bytes))
    if "saved-residuals" in slugs and under:
        rematted, rematted_args = under(FULL)
        proofs.append(
            ("saved-residuals", compiled_memory(rematted, *rematted_args, target=target, num_buffers=0).peak_bytes)
        )
    return Diagnosis(compiled, why, tuple(proofs), found)


def takes_policy(step: Callable[..., Any]) -> bool:
    """Whether a function's one argument is called ``policy``."""
    try:
        return [*inspect.signature(step).parameters] == ["policy"]
    except (TypeError, ValueError):  # a builtin
        return False


def _replaced(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """Places of the arguments for each of whose arrays the step returns one of the same shape and dtype."""
    key = lambda leaf: (leaf.shape, leaf.dtype)
    left = [key(leaf) for leaf in jax.tree.leaves(jax.eval_shape(step, *args))]
    places = []
    for place, arg in enumerate(args):
        wanted = [key(leaf) for leaf in jax.tree.leaves(arg) if hasattr(leaf, "dtype")]
        if wanted and all(wanted.count(one) <= left.count(one) for one in wanted):
            places.append(place)
            for one in wanted:
                left.remove(one)
    return tuple(places)
