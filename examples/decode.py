"""Decode, with the bundled model where no other is named: `tbo-jax decode` from a checkout.

python examples/decode.py --prompt "In the beginning God"
python examples/decode.py --model DIR_OR_HUB_ID --chat --prompt "Why is the sky blue?"
USE_TBO=1 python examples/decode.py --devices 4 --prompt "And it came to pass"
"""

import sys
from pathlib import Path

from tbo_jax.cli.decode import main

BUNDLED = Path(__file__).parent / "kjv-moe"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "decode.py", str(BUNDLED)))
