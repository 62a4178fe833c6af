"""Without PyTorch, which is optional, its files can't be imported for their doctests."""

import importlib.util

collect_ignore_glob = (
    []
    if importlib.util.find_spec("torch")
    else ["models/torch_*.py", "policies/torch_contexts.py", "tests/torch/reference_stack.py"]
)
