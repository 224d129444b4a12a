"""The text for the package index: README.md without pictures that are files of this repository."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text("utf-8")

setup(
    long_description=re.sub(r"!\[[^\]]*\]\((?!https://)[^)]*\)\n*", "", README),
    long_description_content_type="text/markdown",
)
