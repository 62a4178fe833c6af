"""A user program for the type checker alone; pytest must not import it."""

collect_ignore = ["user.py"]
