"""Finds experts, checks that they are whole, and cuts stacks of them apart."""
