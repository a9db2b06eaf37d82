"""Checkpoints: saving, restoring on any mesh, and what must match between the two."""
