"""What commands find and return, and how it is shown.

rows.py        one tensor, or one kind of module, in a result
results.py     what each command returns
measured.py    what verification and comparison gather of a tensor, piece by piece
weights.py     from what was gathered to rows and faults
tolerance.py   how large the error of a weight may be
text.py        results as lines for a terminal
page.py        a verification as an HTML page, results as JSON files
card.py        the model card of a quantized checkpoint
"""
