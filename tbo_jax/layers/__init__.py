"""Building blocks of decoder layers, shared by the architectures in `models/`."""
