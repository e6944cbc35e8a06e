"""Devices that compute, and the choice among them."""
