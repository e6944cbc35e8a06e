"""What commands find and return, and how it is shown.

rows.py        one tensor, or one kind of module, in a result
results.py     what each command returns
measured.py    what verification and comparison gather of a tensor, piece by piece
weights.py     from what was gathered to rows and faults
tolerance.py   how large the error of a weight may be
unusual.py     modules that are not treated like their kind
loading.py     how a result is loaded, and what that takes
text.py        what a terminal shows: results as lines, notes, progress
as_json.py     results as JSON
page.py        a verification as an HTML page
card.py        the model card of a quantized checkpoint
"""
