"""Text from trained parameters."""
