"""Builds the training corpus and the tokenizer of the bundled ``nano`` model.

Run ``python -m tools.nano_corpus`` from the repository root.  The package fetches pinned
distributions, reduces them to three genres of clean text (code, prose, structured), trains a
small byte-level BPE tokenizer and packs the token streams into compressed arrays, so that the
model can be trained on a machine that has no network.
"""
