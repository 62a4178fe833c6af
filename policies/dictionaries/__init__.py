"""What users of other systems write, in this project's words: one module a system, each prints its page of docs/."""
