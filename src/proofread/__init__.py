"""Proofread: machine-learning papers derived, run and ruled on.

Import what you need from a submodule, for example ``from proofread.linear_core import
LinearCoreLoss``. This file stays empty of code: importing ``proofread`` costs nothing, and every
notebook depends on it.
"""
