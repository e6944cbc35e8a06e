"""Teaches transformers 5 to load 4-bit experts of mixtures: `import nf4conv.moe` is all.

Where nf4conv is installed, bitsandbytes calls entry.py when it is imported, and the line is not
needed. Nothing here is imported by the rest of nf4conv, but by `nf4conv env` and
`nf4conv inspect`, which say what loads.

How it gets into transformers, without importing torch or transformers:

    entry.py       is called by bitsandbytes, and waits for transformers
    waiting.py     waits for a module that others import, and acts when it is complete
    conditions.py  says when it acts: the switch, known releases, whether all hooks are there
    hooks.py       are the methods that transformers' quantizer gets
    loading/       is what they do while a checkpoint is loaded

What a model has then:

    weight.py      PackedWeight: the packed parts of one parameter, decoded by experts
    tensor.py      Experts4bit: looks like the 3-D parameter, decodes what is used
    adapted.py     AdaptedExperts: the same with LoRA, without adding it up
    adapter_layers.py  keeps PEFT's layers around packed experts out of compiled graphs
    layer.py       says what of a layer of experts is packed
    sharding.py    shards them over processes, as FSDP2 does, and refuses other ways
    replicas.py    lets DistributedDataParallel train them
    dispatch.py    lets packed layers compute their own way: the seam to forward.py
    forward.py     computes a layer of packed experts
    offload.py     keeps experts in host memory, and those that are used often on the GPU
"""

from nf4conv.moe.entry import activate as activate
from nf4conv.moe.entry import status as status

activate()
