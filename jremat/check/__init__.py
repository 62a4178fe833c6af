"""Did it do what it says?"""

from jremat.check.differences import Difference
from jremat.check.finding import Finding, Rule
from jremat.check.lint import RULES, lint
from jremat.check.replay import Replay, replay

__all__ = ["RULES", "Difference", "Finding", "Replay", "Rule", "lint", "replay"]
