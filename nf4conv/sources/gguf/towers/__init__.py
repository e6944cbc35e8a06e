"""Reads the tower of a model that sees or hears: llama.cpp keeps it in a file of its own (mmproj).

tower.py     says what a kind of tower consists of
qwen.py      lists the towers of Qwen and GLM, whose queries, keys and values are one matrix
encoders.py  lists the towers of other models that see: CLIP, SigLIP, InternViT, Pixtral, Llama 4
hearing.py   lists the towers that hear
joining.py   puts tensors together that are several in the file and one in transformers
registry.py  finds the kind of a tower, by its projector
opening.py   opens a tower's file, and presents its tensors
fitting.py   puts a text model and a tower together, if they fit
"""
