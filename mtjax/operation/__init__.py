"""Operating a run: metrics, progress, faults, several processes."""
