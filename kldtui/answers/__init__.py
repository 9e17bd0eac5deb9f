"""Answer-level flips: what a benchmark's answers do when the model is quantized.

Knows: what its modules hand out: samples (files of lm-evaluation-harness), compare (the figures).
Must not know: recordings, positions, token flips; the two kinds of flips are never pooled.
"""

from kldtui.answers.compare import Change, Comparison, Report, compare_answers
from kldtui.answers.samples import Sample, TaskSamples, read_samples, task_of

__all__ = [
    "Change",
    "Comparison",
    "Report",
    "Sample",
    "TaskSamples",
    "compare_answers",
    "read_samples",
    "task_of",
]
