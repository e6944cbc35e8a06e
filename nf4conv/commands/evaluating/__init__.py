"""Lets models answer the same question, for `nf4conv evaluate`.

question.py    chooses what models are asked, and refuses what cannot be asked before they load
bounds.py      refuses models that cannot be what their files hold
answers.py     loads a model and asks it
distances.py   measures how far the answers of two models are apart
storage.py     says how many bytes and bits a model in 4 bits takes
"""
