"""What a choice of tensors costs per layer: formulas derived from the list of what is kept.

One rule a tensor. The backward pass of a block reads query, key and value, the probabilities and the context, the
middle of the residual stream (block input plus attention's projection) and the MLP's gate, up and activation; what of
these is not kept is made again from what is, and the last matmul, ``mlp_out``, is read by nobody. Tests hold the
formulas to the counted residuals and matmuls of a block, to the byte.
"""

from collections.abc import Iterable, Mapping

from policies.entry import Cost

# Width of each tensor in values per token, as (of GPT, of Llama): multiples of h, k or f. ``residual`` is the untagged
# middle of the stream.
_WIDTH: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("block_in", "attn_norm", "query", "attn_out", "attn_proj", "residual", "mlp_norm"), ("h", "h")),
    **dict.fromkeys(("key", "value"), ("h", "k")),
    "mlp_gate": ("", "f"),
    **dict.fromkeys(("mlp_up", "mlp_act"), ("4h", "f")),
    **dict.fromkeys(("attn_scores", "attn_probs"), ("ns", "ns")),
}
# The matmul that makes each tensor, in FLOPs over 2·b·s·h.
_MATMUL: Mapping[str, tuple[str, str]] = {
    **{name: _WIDTH[name] for name in ("query", "key", "value", "attn_proj", "mlp_gate", "mlp_up")},
    "attn_scores": ("s", "s"),
    "attn_out": ("s", "s"),
}
_SCORES = {"attn_scores", "attn_probs"}


def cost_of(
    kept: Iterable[str],
    *,
    fused: Iterable[str] | None = None,
    on_host: Iterable[str] = (),
    stats: bool = False,
) -> tuple[Cost, Cost]:
    """The cost in the GPT and the Llama family of keeping the block's input and the tensors named.

    Args:
        kept: tensors kept where attention materialises its scores.
        fused: tensors kept where it is fused; None: the same but for scores and probabilities, which don't exist there,
            and with the log-sum-exp (``attn_lse``) wherever ``attn_out`` is named.
        on_host: the part of ``kept`` that lies in host memory.
        stats: whether the norms' float32 statistics are kept: two rows a LayerNorm, one an RMSNorm.

    >>> gpt, llama = cost_of(["query", "key", "value", "attn_proj"])
    >>> gpt.kept_bytes, llama.recomputed_flops
    ('e*b*s*5*h', '2*b*s*h*(2*f + 2*s)')
    """
    dense = {"block_in", *kept}
    unscored = dense - _SCORES | ({"attn_lse"} if "attn_out" in dense else set())
    lean = unscored if fused is None else {"block_in", *fused}
    dense, host = dense - {"attn_lse"}, set(on_host)
    return _cost(0, dense, lean, host, 16 * stats), _cost(1, dense, lean, host, 8 * stats)


def _cost(family: int, dense: set[str], lean: set[str], host: set[str], stat_bytes: int) -> Cost:
    lean_host = {"attn_lse"} if "attn_out" in host and "attn_lse" in lean else set()
    return Cost(
        kept_bytes=_bytes(family, dense, lean, stat_bytes),
        recomputed_flops=_flops(family, dense, lean),
        host_bytes=_bytes(family, dense & host, (lean & host) | lean_host, 0),
    )


def _bytes(family: int, dense: set[str], lean: set[str], stat_bytes: int) -> str:
    both = _sum(_WIDTH[name][family] for name in dense & lean if name in _WIDTH)
    only_dense = _sum(_WIDTH[name][family] for name in dense - lean)
    only_lean = _sum(_WIDTH[name][family] for name in lean - dense - {"attn_lse"})
    inner = _joined(both, ("M", only_dense), ("F", only_lean))
    terms = [f"e*b*s*{_bracketed(inner)}"] if inner else []
    terms += [f"{stat_bytes}*b*s"] if stat_bytes else []
    terms += ["4*F*b*s*n"] if "attn_lse" in lean else []
    return " + ".join(terms) or "0"


def _flops(family: int, dense: set[str], lean: set[str]) -> str:
    """What is missing and must be made again. Probabilities stand in for scores; a fused kernel reruns whole."""
    again = _made_again(dense) - ({"attn_scores"} if "attn_probs" in dense else set())
    again_fused = _made_again(lean) - {"attn_scores", "attn_out"}
    both = _sum(_MATMUL[name][family] for name in again & again_fused)
    only_dense = _sum(_MATMUL[name][family] for name in again - again_fused)
    only_fused = _sum(_MATMUL[name][family] for name in again_fused - again)
    rerun = {} if "attn_lse" in lean else {"s": 2}
    common = {"s": 2} if only_dense == rerun == {"s": 2} else {}
    if common:
        both, only_dense, rerun = both | common, {}, {}
    inner = _joined(both, ("M", only_dense), ("F", only_fused | rerun))
    return f"2*b*s*h*{_bracketed(inner)}" if inner else "0"


def _made_again(kept: set[str]) -> set[str]:
    missing = _MATMUL.keys() - kept
    return missing - {"attn_proj"} if "residual" in kept else missing


def _sum(widths: Iterable[str]) -> dict[str, int]:
    """Multiples of each symbol, in the order h, k, f, s, n*s.

    >>> _sum(["h", "4h", "ns"])
    {'h': 5, 'n*s': 1}
    """
    total = dict.fromkeys(("h", "k", "f", "s", "n*s"), 0)
    for width in filter(None, widths):
        times, symbol = (int(width[0]), width[1:]) if width[0].isdigit() else (1, width)
        total["n*s" if symbol == "ns" else symbol] += times
    return {symbol: times for symbol, times in total.items() if times}


def _joined(both: Mapping[str, int], *conditional: tuple[str, Mapping[str, int]]) -> str:
    terms = [_term(times, symbol) for symbol, times in both.items()]
    for condition, widths in conditional:
        inner = [_term(times, symbol) for symbol, times in widths.items()]
        alone = [_term(times, f"{condition}*{symbol}") for symbol, times in widths.items()]
        terms += [f"{condition}*({' + '.join(inner)})"] if len(inner) > 1 else alone
    return " + ".join(terms)


def _term(times: int, symbol: str) -> str:
    return symbol if times == 1 else f"{times}*{symbol}"


def _bracketed(inner: str) -> str:
    return f"({inner})" if "+" in inner else inner


def in_words(kept_bytes: str, recomputed_flops: str) -> tuple[Cost, Cost]:
    """One cost in words for both families, where no formula of one block can say it."""
    cost = Cost(kept_bytes, recomputed_flops, exact=False)
    return cost, cost
