"""Scorers: what turns token ids into log-probs. One file per engine; `scorer.py` says what they promise."""
