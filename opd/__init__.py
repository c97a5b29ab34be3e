"""On-policy distillation: a teacher in its own process scores the student's tokens; verl trains the student."""

__version__ = "0.1.0"
