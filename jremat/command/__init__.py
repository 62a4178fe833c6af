"""The installed commands: ``jremat explain`` and ``jremat estimate``."""
