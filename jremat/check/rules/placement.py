"""Remats in the wrong place: around another, around everything, around a bare loop, where the compiler merges them."""

from collections.abc import Iterator
from typing import Any

from jremat.calibration import LINT
from jremat.check.finding import Finding, Rule
from jremat.check.sites import Site, equations, graph_of_jaxpr, is_loop, is_remat
from jremat.check.subject import Subject, work
from jremat.jax_internals import SCAN


def _double(subject: Subject) -> Iterator[Finding]:
    for site in subject.sites:
        outer = next((s for s in reversed(site.around) if s.loops == site.loops), None)
        if outer is None or work(site.graph) < LINT.nearly_all * work(outer.graph):
            continue
        known = next(s for s in subject.sites if outer.eqn in s.eqns)
        least = min(subject.without([site]).recomputed, subject.without([known]).recomputed)
        if subject.recomputed > least:
            yield Finding(
                rule=DOUBLE_REMAT.slug,
                message=f"a remat inside the remat of {outer.source} holds the same block: the outer one recomputes "
                "what the inner one reruns or keeps",
                place=site.source,
                cure="keep one of the two: the one with the policy that you mean",
                cost_flops=subject.recomputed - least,
            )


def _whole_loss(subject: Subject) -> Iterator[Finding]:
    if not subject.is_loss:
        return
    for site in subject.sites:
        if site.around or site.repeats > 1 or _bare_scan(site) is not None:
            continue
        if not work(site.graph) or work(site.graph) < LINT.nearly_all * work(subject.graph):
            continue
        bare = subject.without([site])
        if subject.peak.temp_bytes >= LINT.same_peak * bare.peak.temp_bytes and subject.recomputed > bare.recomputed:
            yield Finding(
                rule=WHOLE_LOSS.slug,
                message="one remat stands around the whole loss: its rerun makes every activation before the first "
                "is let go, so the peak is what it was without",
                place=site.source,
                cure="put the remat on each block instead: jremat.remat(Block, policy), or jremat.stack(block, plan)",
                cost_flops=subject.recomputed - bare.recomputed,
            )


def _bare(subject: Subject) -> Iterator[Finding]:
    if subject.is_block:  # one layer is replayed at a time, so what all others keep is saved
        return
    for site in subject.sites:
        several = len(site.eqns) > 1  # of several blocks one is replayed at a time: replays-side-by-side says when not
        scan = None if site.around or site.loops or several else _bare_scan(site)
        if scan is None:
            continue
        bare = subject.without([site])
        if subject.peak.temp_bytes >= LINT.same_peak * bare.peak.temp_bytes and subject.recomputed > bare.recomputed:
            length = scan.params["length"]
            yield Finding(
                rule=BARE_SCAN_BODY.slug,
                message=f"the remat stands around a scan of {length} turns whose body has none: its rerun stacks what "
                f"all {length} keep, so nothing is saved",
                place=site.source,
                cure="put the remat on the scan's body (nn.scan over nn.remat(Block), not the other way round); for "
                "groups of layers use every_k:K",
                cost_flops=subject.recomputed - bare.recomputed,
            )


def _bare_scan(site: Site) -> Any:
    """The loop that does most of a remat's work and has no remat inside, if there is one."""
    for eqn, _, _ in equations(site.body):
        if eqn.primitive.name != SCAN or not is_loop(eqn):
            continue
        inside = eqn.params["jaxpr"]
        done = work(graph_of_jaxpr(inside)) * eqn.params["length"]
        if done > work(site.graph) / 2 and not any(is_remat(e) for e, _, _ in equations(inside)):
            return eqn
    return None


def _cse(subject: Subject) -> Iterator[Finding]:
    for site in subject.sites:
        if site.prevent_cse or site.loops:
            continue
        saved = subject.without([site]).rows.total_bytes - subject.rows.total_bytes
        if saved > 0:
            yield Finding(
                rule=CSE_UNDONE.slug,
                message="prevent_cse=False outside a scan: the compiler sees that the rerun is the first run again, "
                "merges the two and keeps the values",
                place=site.source,
                cure="leave prevent_cse=True outside a scan (False is right inside one alone)",
                cost_bytes=saved,
            )


DOUBLE_REMAT = Rule(
    "double-remat",
    "two remats around one block: recomputed twice",
    "the outer rerun runs the block once more, then the inner one again; what the inner one keeps is not kept over",
    "keep one of the two",
    _double,
)
WHOLE_LOSS = Rule(
    "whole-loss",
    "the whole loss under one checkpoint: no memory is saved",
    "its rerun makes all activations at once, when the backward pass begins",
    "a remat for each block",
    _whole_loss,
)
BARE_SCAN_BODY = Rule(
    "bare-scan-body",
    "`remat(scan)` or `remat_scan` whose innermost body is bare",
    "the rerun stacks what every turn of the loop keeps",
    "a remat on the scan's body",
    _bare,
)
CSE_UNDONE = Rule(
    "cse-undone",
    "layers unrolled with prevent_cse=False: the remat is undone",
    "outside a loop the compiler merges the rerun with the first run",
    "prevent_cse=True",
    _cse,
)
RULES = (DOUBLE_REMAT, WHOLE_LOSS, BARE_SCAN_BODY, CSE_UNDONE)
