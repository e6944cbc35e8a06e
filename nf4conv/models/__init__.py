"""Knows how model architectures are configured and named. Reads no weights.

config.py           reads and edits config.json
releases.py         adds keys to config.json that only one release of transformers reads
family.py           declares the ways in which a model family may deviate from the rules
family_table.py     lists the deviations of model types
denoiser_table.py   lists the deviations of submodels of diffusers
families.py         finds the families of a model
expert_layouts.py   lists how families stack experts in one tensor
single_experts.py   recognises single experts by name, and finds the stacks they belong to
name_patterns.py    recognises what a module is by its name: embedding, head, router or tower
module_names.py     maps names on disk to the names that loaders use
"""
