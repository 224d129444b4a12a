"""Attention over ragged batches: paged for decoding, dense for training."""
