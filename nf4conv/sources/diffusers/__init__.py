"""Opens diffusers pipelines, and gives denoisers their original names.

folder.py           opens a pipeline: finds its submodels and its other files
original_names.py   gives the tensors of a denoiser the names that its authors gave them
name_tables.py      lists which modules of diffusers stand in each original module
"""
