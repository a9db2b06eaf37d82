"""Matrix products in formats of less than 16 bits."""
