"""The model card of a checkpoint that nf4conv wrote: its README.md, as the Hub shows it.

Two runs of the same plan write the same card.

cards.py          composes the cards of checkpoints, merged models and diffusers pipelines
front_matter.py   reads the front matter of the original's card, and writes that of ours
sections.py       writes the sections below the front matter
subject.py        says what a card is about
"""
