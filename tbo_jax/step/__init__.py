"""The step of a model: traced for one device, compiled and run over all of them."""
