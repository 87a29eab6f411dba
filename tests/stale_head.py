"""A worker extension without the repair of vLLM's tied head, to show that a test would notice."""

from generators import worker

worker._refresh_tied_head = lambda model, model_config: None
WorkerExtension = worker.WorkerExtension
