"""Before JAX starts: the CPU, as eight devices, so that sharded code runs; the CUDA plugin may lie there unused.

What is compiled for the CPU runs once or twice, so it is compiled with few optimizations, and what one process compiled
the others read, those that a test starts too.
"""

import importlib.util
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Without PyTorch, which is optional, its files can't be imported for their doctests.
collect_ignore_glob = (
    []
    if importlib.util.find_spec("torch")
    else ["models/torch_*.py", "policies/torch_contexts.py", "tests/torch/reference_stack.py"]
)
