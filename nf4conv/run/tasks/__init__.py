"""Tasks: what a worker takes next. They are written once, for all devices.

shard.py            divides the work of a shard into tasks
pack.py             packs weights
convert.py          decodes and casts tensors that are kept
copy.py             copies bytes of the source
compare_bytes.py    compares bytes in host memory
compare_values.py   compares tensors value by value
prove.py            proves that what is stored is right
diagnose.py         says how what is stored differs from what its source gives
scan.py             finds weights that hold values which cannot be packed
"""
