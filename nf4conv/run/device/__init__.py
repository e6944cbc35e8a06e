"""Devices that compute, and the choice among them.

protocol.py     what a device does for a task, and what goes to it and comes back
choice.py       chooses the device of each job, and says why some take torch
on_torch/       computes with torch, on any device
on_driver/      computes on an NVIDIA GPU by way of the CUDA driver, without torch
"""
