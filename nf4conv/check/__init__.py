"""Checks a finished checkpoint by its headers, config and small tensors. Decodes no weights.

checks.py            names every check that verify makes
structure.py         looks at all files of a 4-bit checkpoint and notes every fault
config_check.py      checks config.json against the tensors
model_config.py      compares config.json with that of the source
model_keys.py        lists what tools change in config.json without changing the model
record_check.py      compares nf4conv.json and the card with what is stored
copied_files.py      compares the files beside the weights with those of the source
skip_list_check.py   checks llm_int8_skip_modules against what is packed
experts_check.py     checks that the experts of each layer are whole, and packed alike
pairing.py           matches the tensors of a checkpoint with those of its source
decoded/             checks a checkpoint that was decoded
calibrated.py        proves that calibrated weights are what was written
comparing.py         matches the tensors of any two checkpoints, and says how they can be compared
checksums.py         checks SHA256SUMS
intact.py            looks whether a finished result still is what was written
"""
