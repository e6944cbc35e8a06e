"""The rows of results: one tensor, or one kind of module. Their fields are the keys of --json.

The rows of a plan are in plan/rows.py.
"""
