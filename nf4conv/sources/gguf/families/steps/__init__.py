"""Has what families are made of.

common.py      has the names and keys that many families share
joining.py     puts tensors together that are several in the file and one in transformers
completing.py  completes config.json with what keys of the metadata do not say by themselves
telling.py     tells families apart that llama.cpp gives one name
"""
