import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import measured_stack as stack

from jremat.measure import compiled_memory


@pytest.fixture(scope="session")
def on_h200():
    """The stack under each policy, compiled for an H200 that is not here."""
    return {policy: compiled_memory(stack.step(policy), *stack.shapes(), target="h200") for policy in stack.POLICIES}
