"""The command that runs a planned step: a plan holds for no other."""

import shlex

from scripts.benchmark.build import config_of
from scripts.planning.question import Answer


def how_to_run(answer: Answer, spec: str) -> str:
    """The command whose step is the planned one, in a line.

    ``scripts/train.py`` runs on one device and computes all logits at a time; any other step is
    ``scripts/bench.py``'s.

    Args:
        spec: of the saved plan.
    """
    case, seq = answer.case, answer.tokens // answer.case.batch
    same = ["--attention", case.attention, "--compute-dtype", config_of(case).compute_dtype]
    same += ["--layers", str(case.layers)] if case.layers else []
    if answer.devices == 1 and not case.loss_chunk:
        step = ["--model", case.model, "--batch", str(case.batch), "--seq", str(seq), *same, "--dropout", "0"]
        return f"at the same shapes: scripts/train.py {shlex.join([*step, '--policy', spec])}"
    why = f"{answer.devices} devices" if answer.devices > 1 else "a chunked loss"
    step = ["--model", case.model, "--target", case.target, "--batch", str(case.batch), "--seq", str(seq), *same]
    step += ["--mesh", case.mesh] if case.mesh else []
    step += ["--loss-chunk", str(case.loss_chunk)] if case.loss_chunk else []
    return f"with {why}, at the same shapes: scripts/bench.py {shlex.join([*step, '--policies', spec])}"
