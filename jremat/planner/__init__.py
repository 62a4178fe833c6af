"""Which choice is best?"""
