"""Attention: the paged key/value cache and its buffers, work items, a kernel for each platform."""
