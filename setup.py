"""Packages of the wheel: those of uvit_decay/, and configs/ and checkpoints/, which it keeps inside of uvit_decay."""

from setuptools import find_packages, setup

DATA = {"uvit_decay.configs": "configs", "uvit_decay.checkpoints": "checkpoints"}

setup(packages=[*find_packages(include=["uvit_decay", "uvit_decay.*"]), *DATA], package_dir=DATA)
