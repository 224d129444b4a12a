"""The command `tbo-jax`: a module for each of its subcommands."""
