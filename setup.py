"""Everything static is in pyproject.toml; this file exists for the compiled extensions of csrc/."""

from setuptools import setup

setup()
