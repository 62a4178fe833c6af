"""The scripts' manners are the installed command's."""

from jremat.command.line import exit_code, fail, one_line, parse, run, uninterrupted, unwritten, warn

__all__ = ["exit_code", "fail", "one_line", "parse", "run", "uninterrupted", "unwritten", "warn"]
