"""`python -m tbo_jax.schedule` is `tbo-jax schedule`."""

import sys

from tbo_jax.cli.schedule import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python -m tbo_jax.schedule"))
