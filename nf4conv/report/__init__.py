"""Holds what commands return, and shows it.

results/           holds the results that commands return
rows/              holds their rows: one tensor, or one kind of module
measured.py        gathers what verification and comparison measure of a tensor, piece by piece
weights.py         judges what was measured of packed weights
inspected.py       describes the tensors of a checkpoint
inspected_experts.py  says in which layout experts are, and what loads them
verified.py        composes the report of a verification
compared.py        describes how the tensors of two checkpoints compare
tolerance.py       says how large the relative error of a weight may be
places.py          finds where a tensor stands in a model, and what is unlike its kind there
loading.py         says how a result is loaded, and what that takes
advice.py          says why a result is large, and what would make it smaller
text/              shows results, notes and progress on a terminal
as_json.py         writes results as JSON
page.py            writes a verification as an HTML page, from page.html and page.js
card/              writes the model card of a checkpoint
"""
