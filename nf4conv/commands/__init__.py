"""Runs the commands: one entrance each, from a source and options to a plan, and to a result.

quantize.py, dequantize.py   write a checkpoint: plan, execute, or both at once
finish.py                    makes a checkpoint of what parts have left in a folder
verify.py                    checks a 4-bit checkpoint, alone or against its source
decoded.py                   plans the verification of what dequantize made
compare.py                   compares two checkpoints
inspect.py                   shows what is in a checkpoint
evaluate.py                  compares what models answer
describe.py                  describes a plan, for --dry-run
environment.py               shows versions and what would compute, for bug reports
shortcuts.py                 takes the options of a command as keywords
keywords.py                  names those keywords for type checkers, and explains them
submodels.py                 writes the submodels of a diffusers pipeline and joins their reports
quantizing/                  quantizes one checkpoint or a diffusers pipeline, and uploads it
evaluating/                  lets models answer the same question
spread/                      spreads a run over several GPUs, or over a Ray cluster
"""
