"""Plans the complete output: every tensor, its shard, its offset and its size. Reads no weights.

quantization.py     plans the quantization of one checkpoint
dequantization.py   plans the dequantization of one checkpoint
joining.py          puts single experts back into the stacks that their family has on disk
diffusers.py        holds the plans of a diffusers pipeline's submodels
jobs.py             holds one job for each output tensor, shards of jobs, and the whole
calibration.py      says what a calibration will do: weights, texts, sizes
arrange.py          divides jobs into shards and gives every tensor its offset
provenance.py       says of each weight in 4 bits what it is, and what it was made from
writing.py          holds everything that is known about an output checkpoint
rows.py             describes what becomes of each tensor
fingerprint.py      tells plans apart, so that a run is resumed only by its like
parts.py            divides a plan into the parts that several processes make
"""
