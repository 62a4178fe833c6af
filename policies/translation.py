"""A setting of another system in this grammar, with what could not be carried over."""

from dataclasses import dataclass

from jremat.policy import PolicyLike


@dataclass(frozen=True)
class Translation:
    """What another system's setting stands for here.

    Args:
        policy: the policy, plan or request; ``.spec`` can be pasted anywhere.
        notes: what differs and what was not carried over, one line each; empty: it is the same.

    >>> from policies import translate
    >>> print(translate("maxtext", "none"))
    full
      note: MaxText's 'none' hands None to JAX, which is full remat on most of its paths; to keep everything: none
    """

    policy: PolicyLike
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((self.policy.spec, *(f"  note: {note}" for note in self.notes)))

    __repr__ = __str__
