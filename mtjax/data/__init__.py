"""Data: sources, tokenizers, packing, and the loader that feeds the training loop.

Shape legend: M microbatches, B sequences per microbatch, T tokens of a sequence.
"""
