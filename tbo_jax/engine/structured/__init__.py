"""Texts of a given form: their grammars, where each request is in its own, and what may follow."""
