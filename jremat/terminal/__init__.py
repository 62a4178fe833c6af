"""What every command shares: how it starts and ends, its flags, its tables."""
