"""Compiles, checks and picks plans of product/panels that `python -m benchmarks.panel_plans` times.

candidates.py  says which plans are worth a measurement
compiling.py   compiles plans without a GPU
checking.py    compiles and checks plans in processes of their own
"""
