"""Mixture of experts: routing, the exchange of tokens between devices, grouped matrix products."""
