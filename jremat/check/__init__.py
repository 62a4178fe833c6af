"""Did it do what it says?"""

from jremat.check.finding import Finding, Rule
from jremat.check.lint import RULES, lint

__all__ = ["RULES", "Finding", "Rule", "lint"]
