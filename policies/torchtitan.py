"""torchtitan's selective checkpoint by operation, by name instead of by count.

torchtitan keeps a list of expensive operations and, of the bias-free matmuls (aten.mm), every second one, counted
afresh in each block: in a Llama block, in the order wq wk wv wo w1 w3 w2, it keeps the 1st, 3rd, 5th and 7th. A count
shifts when a matmul is added; names don't.
"""

from jremat.policy import Policy
from jremat.policy.ops import ATTENTION, BATCHED_MATMUL, COLLECTIVE, CONV, SCALED_MATMUL, TOP_K
from policies.entry import Entry

# torchtitan's list but for mm: bmm, convolution, attention, _scaled_mm, topk and max, reduce_scatter and all_to_all.
LIST = Policy.ops(BATCHED_MATMUL, CONV, SCALED_MATMUL, ATTENTION, TOP_K, COLLECTIVE)
_ATEN = ("mm", *(op for family, _ in LIST.families for op in family.aten))

SELECTIVE_OP = Policy.save("query", "value", "mlp_gate", "mlp_out").with_optional("mlp_gate") | LIST
SELECTIVE_OP_GPT = Policy.save("query", "value", "mlp_up") | LIST

_SOURCE = "torchtitan/distributed/activation_checkpoint.py, _get_custom_policy, as of 2025"
_CORE = ("attn_scores", "attn_out")
_KEPT = ("query", "value", "mlp_gate", *_CORE)
_KEPT_GPT = ("query", "value", "mlp_up", *_CORE)

ENTRIES = (
    Entry(
        "torchtitan_selective_op",
        SELECTIVE_OP.labelled("torchtitan_selective_op"),
        "query, value, attention (fused, or its scores and context), the MLP's gate (w1) and out (w2, which the "
        "backward pass never reads); convolutions, fp8 matmuls, top-k, collectives",
        "key, attention's projection, up (w3), norms, activations. A plain MLP has no gate: there it recomputes up, "
        "where torchtitan, counting, would keep it; torchtitan_selective_op_gpt does",
        "torchtitan mode=selective, selective_ac_option=op, on a gated MLP",
        _SOURCE,
        aten=_ATEN,
    ),
    Entry(
        "torchtitan_selective_op_gpt",
        SELECTIVE_OP_GPT.labelled("torchtitan_selective_op_gpt"),
        "query, value, attention, the plain MLP's up; convolutions, fp8 matmuls, top-k, collectives",
        "key, attention's projection, norms, activations; on a gated MLP the gate",
        "torchtitan mode=selective, selective_ac_option=op, on a plain MLP without biases (with biases every matmul "
        "is an addmm, which isn't counted, and all are kept: save_only_matmuls)",
        _SOURCE,
        aten=_ATEN,
    ),
)
"""torchtitan's selective op for both kinds of MLP; its other modes are ``full``, ``torchtitan:K`` and ``budget:``."""
