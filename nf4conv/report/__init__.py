"""What commands find and return, and how it is shown.

rows.py        one tensor, or one kind of module, in a result
results.py     what each command returns
places.py      where a tensor stands in a model, and what is not treated like its kind there
measured.py    what verification and comparison gather of a tensor, piece by piece; rows and faults of weights
tolerance.py   how large the error of a weight may be
loading.py     how a result is loaded, and what that takes
text.py        what a terminal shows: results as lines, notes, progress
as_json.py     results as JSON, and a verification as an HTML page
card.py        the model card of a quantized checkpoint
"""
