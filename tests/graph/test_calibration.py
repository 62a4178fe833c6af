"""Every version of JAX that counts as calibrated has rules of its own."""

import warnings

import pytest

from jremat.calibration import COMPILERS
from jremat.graph.rules import rules_for


@pytest.mark.parametrize("version", COMPILERS)
def test_a_calibrated_version_has_rules_of_its_own_and_no_warning(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rules_for(version).jax == version
