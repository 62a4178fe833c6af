"""The scripts' manners are the installed command's."""

from jremat.command.line import fail, one_line, parse, warn

__all__ = ["fail", "one_line", "parse", "warn"]
