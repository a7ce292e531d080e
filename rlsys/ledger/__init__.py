"""The ledger of a run: samples and groups in SQLite, their tokens in segment files, and the readers of both."""
