"""The commands: from a source and options to a plan, and from a plan to a result; one entrance
each.

quantize.py  dequantize.py  verify.py  compare.py  inspect.py     one checkpoint or a diffusers pipeline alike
single/        quantizing one checkpoint: the plan and its execution
diffusers.py   the submodels of a diffusers pipeline, one after the other, and one result of all
parts.py       --part: which shards a process makes; finish.py makes one checkpoint of what parts have left
spread.py      --device cuda:all, --ray: parts by processes of this host, or by tasks of Ray
output.py      from a plan to a finished output folder
complete.py    a result that is there already
describe.py    --dry-run
environment.py versions and who computes, for bug reports
push.py        to the Hub, while the folder is filled
skeleton.py    --plan-with transformers
"""
