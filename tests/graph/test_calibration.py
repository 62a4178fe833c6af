"""A version of JAX that nobody calibrated is said once, with what stands for it."""

import warnings

import pytest

from jremat.calibration import COMPILERS, nearest_compiler
from jremat.graph.rules import rules_for


@pytest.mark.parametrize("version", COMPILERS)
def test_a_calibrated_version_has_rules_of_its_own_and_no_warning(version):
    nearest_compiler.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rules_for(version).jax == version


@pytest.mark.parametrize("version, stands", [("0.99.1", COMPILERS[-1]), ("0.11.0", "0.10.2"), ("0.4.30", COMPILERS[0])])
def test_an_unknown_version_is_warned_of_once(version, stands):
    nearest_compiler.cache_clear()
    with pytest.warns(UserWarning, match=rf"jax {version}: .* calibrated on jax {stands}"):
        assert rules_for(version).jax == stands
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rules_for(version).jax == stands
