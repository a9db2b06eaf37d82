"""Models as lists of block specs, and the presets of known families."""
