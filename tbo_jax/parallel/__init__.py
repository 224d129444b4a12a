"""Devices: the mesh and what is sharded over it, processes, and what travels between devices."""
