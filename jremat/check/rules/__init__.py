"""The lint's rules, one file a group."""
