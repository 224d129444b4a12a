"""Two-batch overlap for Flax decoders, and the decode engine that proves it."""
