"""What a training step will cost, known before a GPU is rented: memory, collectives, FLOPs."""
