"""What plan.py is made of."""
