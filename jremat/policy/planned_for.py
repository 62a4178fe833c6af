"""What a planned policy was planned for: used on anything else it is refused, as its proof says nothing there."""

import importlib.metadata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

SHOWN = 3  # shapes in a message


@dataclass(frozen=True)
class PlannedFor:
    """Shapes, layers and versions of a plan.

    Args:
        shapes: of the floating arrays that the function is given, arguments and constants in any order, as
            ``float32[2, 3]``; empty: any.
        num_layers: of the stack; None: any, or no stack.
        versions: of JAX and of what compiled, by package; a package that isn't installed isn't held to its version.
        plan: the spec that it was read from, for messages; not compared.

    Raises:
        ValueError: a package without a name, or without a version.
    """

    shapes: tuple[str, ...] = ()
    num_layers: int | None = None
    versions: tuple[tuple[str, str], ...] = ()
    plan: str = field(default="a plan", compare=False)

    def __post_init__(self) -> None:
        """Refuse versions that can't be held to anything."""
        for name, version in self.versions:
            if not name.strip():
                raise ValueError(f"versions: expected the name of a package before {version!r}, got {name!r}")
            if not version.strip():
                raise ValueError(f"versions: expected the version of {name!r}, got {version!r}")

    def shapes_problem(self, found: Iterable[str]) -> str | None:
        """What to say of a function that is given the arrays ``found``; None where they are the plan's.

        >>> PlannedFor(("float32[8]", "float32[2, 8]")).shapes_problem(["float32[8]", "float32[4, 8]"])
        "'a plan' was planned for float32[2, 8], the function has float32[4, 8]: plan anew"
        """
        wanted, given = Counter(self.shapes), Counter(found)
        lost, new = (sorted((one - other).elements()) for one, other in ((wanted, given), (given, wanted)))
        if not self.shapes or not (lost or new):
            return None
        if not lost:
            return f"{self.plan!r} was planned without {_listed(new)}, which the function has: plan anew"
        has = f"the function has {_listed(new)}" if new else "which the function hasn't"
        return f"{self.plan!r} was planned for {_listed(lost)}, {has}: plan anew"

    def layers_problem(self, num_layers: int) -> str | None:
        """What to say of a stack of so many layers; None where they are the plan's.

        >>> PlannedFor(num_layers=12).layers_problem(24)
        "'a plan' was planned for a stack of 12 layers, this one has 24: plan anew"
        """
        if self.num_layers in (None, num_layers):
            return None
        return (
            f"{self.plan!r} was planned for a stack of {self.num_layers} layers, this one has {num_layers}: plan anew"
        )

    def versions_problem(self) -> str | None:
        """What to say of the packages that are installed; None where they are the plan's.

        >>> PlannedFor(versions=(("jax", "0.4.1"), ("no-such-package", "1"))).versions_problem()[:42]
        "'a plan' was planned with jax 0.4.1, here "
        """
        found = {name: version for name, _ in self.versions if (version := _installed(name)) is not None}
        other = [(name, was, found[name]) for name, was in self.versions if found.get(name, was) != was]
        if not other:
            return None
        there, here = (", ".join(f"{row[0]} {row[k]}" for row in other) for k in (1, 2))
        return f"{self.plan!r} was planned with {there}, here is {here}: plan anew"


def _listed(shapes: list[str]) -> str:
    more = f" and {len(shapes) - SHOWN} more" if len(shapes) > SHOWN else ""
    return f"{', '.join(shapes[:SHOWN])}{more}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # or a name that no package can have
        return None
