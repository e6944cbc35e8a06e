"""Holds everything that depends on the operating system, and nothing else.

Each function means the same on Linux, macOS and Windows, and says where a system gives less. No
module outside this room names a call that one of them lacks (tests/test_layering.py).
"""
