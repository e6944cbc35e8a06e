"""Teaches transformers 5 to load 4-bit experts of mixtures: importing this is all."""

from nf4conv.inference.moe.entry import activate as activate
from nf4conv.inference.moe.entry import status as status

activate()
