"""Linen modules of one transformer block.

Shape suffixes: B batch, T query sequence, S key sequence, D embed, N query heads, K kv heads,
G query heads per kv head, H head dim, F ffn, V vocab.
"""
