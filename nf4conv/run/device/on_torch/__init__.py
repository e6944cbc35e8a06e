"""Computes with torch, on any device."""
