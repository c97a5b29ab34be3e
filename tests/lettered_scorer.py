"""The oracle with a tokenizer: `--backend lettered_scorer --model abcdefgh`, whose tokens are those letters."""

from __future__ import annotations

import msgspec

from opd.fingerprint import vocabulary_bytes, vocabulary_fingerprint
from opd.scoring.oracle import OracleScorer, OracleSettings
from opd.scoring.oracle import load as load_oracle
from opd.scoring.scorer import LoadOptions


class Letters:
    """The one method of a tokenizer that fingerprints use."""

    def __init__(self, letters: str):
        self.letters = letters

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self.letters)}


def load(options: LoadOptions) -> OracleScorer:
    size = len(options.model)
    oracle = load_oracle(msgspec.structs.replace(options, model=f"oracle:vocab={size}"))
    vocabulary = vocabulary_bytes(Letters(options.model))
    info = msgspec.structs.replace(oracle.info, name=options.model, tokenizer=vocabulary_fingerprint(vocabulary))
    scorer = OracleScorer(OracleSettings(vocab=size), info)
    scorer.vocabulary = vocabulary
    return scorer
