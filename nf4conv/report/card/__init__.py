"""The model card of a checkpoint that nf4conv wrote: its README.md, as the Hub shows it.

Two runs of the same plan write the same card.

cards.py          composes the cards of checkpoints, merged models and diffusers pipelines
front_matter.py   reads the front matter of the original's card, and writes that of ours
sections.py       writes the sections below the front matter
subject.py        says what a card is about
"""

from nf4conv.report.card.cards import diffusers_card, merged_card, model_card, with_evaluation
from nf4conv.report.card.front_matter import read_front_matter
from nf4conv.report.card.sections import measured_rows
from nf4conv.report.card.subject import Figures

__all__ = [
    "Figures",
    "diffusers_card",
    "measured_rows",
    "merged_card",
    "model_card",
    "read_front_matter",
    "with_evaluation",
]
