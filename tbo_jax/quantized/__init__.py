"""Weights in fewer bits: an array of them, the product that reads it, and what makes one."""
