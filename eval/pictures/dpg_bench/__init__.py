"""DPG-Bench (Hu et al. 2024, ELLA): does an image show everything that its dense prompt says?

A visual question answering (VQA) model answers a question about each proposition of the prompt. A proposition holds
only if all propositions it depends on hold too: a truck that is missing is not red.
"""

# ruff: noqa: F401 - the public names of the package

from .answering import Answers, VqaModel, ask_missing, find_pictures, open_picture
from .command import DpgBenchConfig, evaluate_dpg_bench, figures, plot, tables
from .questions import (
    COLUMNS,
    DpgBench,
    Proposition,
    band,
    parse_rows,
    proposition_words,
    read_dpg_bench,
    token_position,
)
from .scoring import Outcomes, compare_outcomes, holds, outcomes, prompt_scores, score
