"""How a stack of blocks is run: scanned, rematerialised, split over devices."""
