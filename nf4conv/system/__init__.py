"""Everything that depends on the operating system.

background.py   threads that a command waits for, or leaves behind, however it ends
"""
