"""Collectives are counted with the turns of their loops, and tell what a policy adds."""

from dataclasses import replace

import pytest

from jremat.measure import program
from jremat.measure.collectives import Collective, collectives_of, in_text
from scripts.benchmark.build import build
from scripts.benchmark.config import Case

TEXT = """\
HloModule jit_f, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %ag = bf16[32,8]{1,0} all-gather(%x), channel_id=1, dimensions={0}
  %rs = f32[4,8]{1,0} reduce-scatter(f32[32,8]{1,0} %g), channel_id=2, dimensions={0}, to_apply=%add
}

%cond (p: (s32[], bf16[4,8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n)
}

%unknown (p: f32[2]) -> f32[2] {
  %inner = (s32[], bf16[4,8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %cp = f32[2]{0} collective-permute(%p), channel_id=3
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = (s32[], bf16[4,8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %v = f32[2] while(%u), condition=%cond, body=%unknown
  %ar = (f32[16]{0}, f32[16]{0}) all-reduce-start(%y), channel_id=4, to_apply=%add
  ROOT %d = f32[16]{0} all-reduce-done(%ar)
}
"""


def test_a_text_is_counted_by_hand() -> None:
    assert in_text(TEXT) == (
        Collective("all-gather", 8, 8 * 32 * 8 * 2, True),
        Collective("all-reduce", 1, 64),
        Collective("reduce-scatter", 8, 8 * 32 * 8 * 4, True),
        Collective("collective-permute", 1, 8, True),
    )


def test_a_policy_that_recomputes_a_row_parallel_matmul_repeats_its_all_reduce() -> None:
    """Under tensor parallelism a block sums over devices twice forward; ``full`` sums attention's again, a layer each.

    The MLP's output is read by nothing in the backward pass, so that it isn't recomputed.
    """
    case = Case("tiny", "none", "cpux8", 8, 16, layers=5, mesh="data=2,tensor=4")

    def executions(policy: str) -> int:
        built = build(replace(case, policy=policy))
        _, run = program(built.step, built.state, built.tokens, target="cpux8", num_buffers=0)
        return {row.kind: row.executions for row in collectives_of(run)}["all-reduce"]

    none = executions("none")
    assert executions("full") == none + 5
    assert executions("save:attn_proj") == none == pytest.approx(4 * 5, abs=10)
