"""The broker: hands out prompts, keeps the ledger of samples, feeds the learner."""
