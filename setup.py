"""Every package of the checkout, `kernels/` as `effops.kernels`; all else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["effops", "effops.*"]), "effops.kernels"])
