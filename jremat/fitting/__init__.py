"""Which parts of any program to remat so that it fits?"""
