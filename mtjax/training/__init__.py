"""The training step, what it minimises, and the loop around it."""
