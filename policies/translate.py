"""Other systems' settings as policies: ``translate("megatron", "--recompute-activations")``."""

from collections.abc import Callable, Mapping
from typing import Any

from policies.near import did_you_mean
from policies.translate_maxtext import from_maxtext
from policies.translate_megatron import from_megatron
from policies.translate_torch import from_huggingface, from_torchtitan
from policies.translation import Translation

SYSTEMS: Mapping[str, Callable[..., Translation]] = {
    "huggingface": from_huggingface,
    "maxtext": from_maxtext,
    "megatron": from_megatron,
    "torchtitan": from_torchtitan,
}


def translate(system: str, *setting: Any, **options: Any) -> Translation:
    """What another system's setting keeps and recomputes, as a policy here.

    Args:
        system: ``megatron``: its command line, one string or a list; flags that don't concern activations are named in
            a note. ``maxtext``: its ``remat_policy`` and, under ``custom``, a mapping of tensors to ``device``,
            ``offload`` or ``remat``. ``torchtitan``: its ``activation_checkpoint`` table, or a whole config that has
            it. ``huggingface``: Transformers' ``gradient_checkpointing_kwargs``, with ``every_n_layers``.
        setting: of that system.
        options: of Transformers ``gradient_checkpointing``, of MaxText ``tensors``.

    Returns:
        The policy, plan or request, and notes on what differs or was not carried over.

    Raises:
        ValueError: an unknown system; a setting that it doesn't know, or settings that contradict each other.

    >>> translate("megatron", "--recompute-granularity full --recompute-method block --recompute-num-layers 12").policy
    policies.get('block:12')
    >>> translate("maxtext", "custom", {"query_proj": "device", "mlpwo": "offload", "out_proj": "remat"}).policy.spec
    'save:query;offload:mlp_out'
    >>> translate("huggingface", {"use_reentrant": False}).policy.spec
    'full'
    >>> translate("megatorn", "--recompute-activations")
    Traceback (most recent call last):
    ...
    ValueError: system: no translation from 'megatorn'; did you mean 'megatron'?
    """
    if system not in SYSTEMS:
        raise ValueError(did_you_mean("system: no translation from", str(system), SYSTEMS))
    return SYSTEMS[system](*setting, **options)
