"""The command line: ``jremat explain``, and the manners that every script shares."""
