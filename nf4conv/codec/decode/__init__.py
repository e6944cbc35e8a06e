"""Decodes tensors that another quantization encoded: by Triton on a GPU, by torch elsewhere.

sources/encodings/types/ describes the encodings; run/device/on_torch/reading.py calls the decoders.

scaled.py    multiplies 8-bit values with scales: FP8, MXFP8, INT8 and 8-bit bitsandbytes
fp4.py       multiplies pairs of E2M1 values with scales: MXFP4 and NVFP4
integers.py  multiplies packed integers with scales: compressed-tensors, GPTQ and AWQ
halves.py    subtracts and multiplies as HQQ does, whose words hold codes of several parts
ternary.py   multiplies or divides as BitNet does, whose bytes hold a code of each quarter
ggml.py      decodes the blocks of llama.cpp's GGUF files
undoing.py   undoes what llama.cpp's converter did to weights
packed.py    decodes 4-bit weights of bitsandbytes, or some blocks of one
"""
